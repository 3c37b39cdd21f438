-- Look at the streams of one shard and forget tombstones that no message can be late for any more.
-- The index of sessions loses those that expired. ARGV: age in seconds at which a tombstone goes, the same for a session.
-- Returns incarnation, seconds of silence, for each living stream.
-- Where tombstones alone are left they end by themselves, if the shard is not swept any more.
local now, streams, tombstones = tonumber(second()), {}, 0
call('ZREMRANGEBYSCORE', KEYS[1] .. 't', '-inf', now - ARGV[2])
local all = call('HGETALL', KEYS[1] .. 's')
for i = 1, #all, 2 do
  local last, seen = string.match(all[i + 1], '^(%w+) (%d+)$')
  local age = now - (tonumber(seen) or 0)
  if last ~= 'x' then
    streams[#streams + 1] = all[i]
    streams[#streams + 1] = age
  elseif age > tonumber(ARGV[1]) then
    call('HDEL', KEYS[1] .. 's', all[i])
  else
    tombstones = tombstones + 1
  end
end
if #streams == 0 and tombstones > 0 then
  call('EXPIRE', KEYS[1] .. 's', ARGV[1], 'LT')
end
return streams
