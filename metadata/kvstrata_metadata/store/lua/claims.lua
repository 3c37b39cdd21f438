-- Read what agents said of scopes whose key is gone. Returns scope tag, seconds since then, key version and uid, for each.
-- A claim that nobody can read goes.
local now, found = second(), {}
local all = call('HGETALL', KEYS[1] .. 'e')
for i = 1, #all, 2 do
  local at, version, uid = string.match(all[i + 1], '^(%d+) (%d+) ([!-~]*)$')
  if at and string.find(all[i], '^[!-~]+$') then
    found[#found + 1] = all[i]
    found[#found + 1] = math.max(0, now - tonumber(at))
    found[#found + 1] = tonumber(version)
    found[#found + 1] = uid
  else
    call('HDEL', KEYS[1] .. 'e', all[i])
  end
end
return found
