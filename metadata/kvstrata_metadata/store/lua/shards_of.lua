-- Read the shards that incarnations may have announced to. ARGV: incarnations. Returns names joined by blanks, for each.
local found = {}
for i, incarnation in ipairs(ARGV) do
  found[i] = table.concat(call('SMEMBERS', KEYS[1] .. 's' .. incarnation), ' ')
end
return found
