-- Read the whole registry but for the shards. Returns the directory id, then incarnation, record and seconds since the
-- heartbeat (-1 when there is none), for each incarnation. What is under no incarnation's name goes.
local INCARNATION_BYTES = 5
local now, found = second(), { call('GET', KEYS[1] .. 'id') or '' }
local all = call('HGETALL', KEYS[1] .. 'i')
for i = 1, #all, 2 do
  if #all[i] == INCARNATION_BYTES then
    local beat = call('ZSCORE', KEYS[1] .. 'h', all[i])
    found[#found + 1] = all[i]
    found[#found + 1] = all[i + 1]
    found[#found + 1] = beat and math.max(0, now - tonumber(beat)) or -1
  else
    call('HDEL', KEYS[1] .. 'i', all[i])
  end
end
return found
