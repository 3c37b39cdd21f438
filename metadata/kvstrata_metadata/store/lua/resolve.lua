-- Read the records of incarnations. ARGV: incarnations. Returns record and seconds since the heartbeat for each;
-- an empty record when unknown, -1 when there is no heartbeat.
local now, found = second(), {}
for _, incarnation in ipairs(ARGV) do
  local beat = call('ZSCORE', KEYS[1] .. 'h', incarnation)
  found[#found + 1] = call('HGET', KEYS[1] .. 'i', incarnation) or ''
  found[#found + 1] = beat and math.max(0, now - tonumber(beat)) or -1
end
return found
