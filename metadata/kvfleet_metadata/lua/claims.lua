-- Read what agents said of scopes whose key is gone. Returns scope tag, seconds since then, key version and uid, for each.
local now, found = second(), {}
local all = call('HGETALL', KEYS[1] .. 'e')
for i = 1, #all, 2 do
  local at, version, uid = string.match(all[i + 1], '^(%d+) (%d+) (.*)$')
  found[#found + 1] = all[i]
  found[#found + 1] = math.max(0, now - (tonumber(at) or 0))
  found[#found + 1] = tonumber(version) or 0
  found[#found + 1] = uid or ''
end
return found
