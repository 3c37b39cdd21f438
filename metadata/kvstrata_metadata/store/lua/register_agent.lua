-- Give an agent a new incarnation and fence the one that held its name.
-- An older epoch is refused while a newer one lives; when that one is silent, the name is free.
-- ARGV: agent, epoch (16 hex digits), address, seconds of silence after which an agent is dead, name for a new directory.
-- Returns verdict (`ok` or `stale`), incarnation, directory id.
local agent, epoch = ARGV[1], ARGV[2]
local now = second()
local before = call('HGET', KEYS[1] .. 'a', agent)
local record = before and known(before)
if record then
  local beat = tonumber(call('ZSCORE', KEYS[1] .. 'h', before) or 0)
  if record[2] > epoch and now - beat < tonumber(ARGV[4]) then
    return { 'stale', '', '' }
  end
  fence(before, record)
end
local directory = call('GET', KEYS[1] .. 'id') or ARGV[5]
call('SET', KEYS[1] .. 'id', directory)
-- Milliseconds since 2020: numbers of an emptied directory stay above those given out before, so none is used twice.
local clock = call('TIME')
local floor = (clock[1] - 1577836800) * 1000 + math.floor(clock[2] / 1000)
local number = math.max((tonumber(call('GET', KEYS[1] .. 'n') or 0) or 0) + 1, floor)
call('SET', KEYS[1] .. 'n', string.format('%.0f', number))
local incarnation = struct.pack('>I5', number)
call('HSET', KEYS[1] .. 'i', incarnation, cmsgpack.pack({ agent, epoch, ARGV[3], false }))
call('HSET', KEYS[1] .. 'a', agent, incarnation)
call('ZADD', KEYS[1] .. 'h', now, incarnation)
return { 'ok', incarnation, directory }
