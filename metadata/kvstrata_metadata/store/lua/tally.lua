-- Count sessions of one shard by their state. ARGV: position to begin at, sessions to look at.
-- Returns the position to go on from (-1 at the end), then state and count, for each.
local STATE = 3
local from, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
local digests, counts = call('ZRANGE', KEYS[1] .. 't', from, from + limit - 1), {}
for _, digest in ipairs(digests) do
  local packed = call('GET', KEYS[1] .. 'n' .. digest)
  local is_read, record = pcall(cmsgpack.unpack, packed or '')
  local state = is_read and type(record) == 'table' and record[STATE]
  if type(state) == 'string' then
    counts[state] = (counts[state] or 0) + 1
  end
end
local found = { #digests == limit and from + limit or -1 }
for state, count in pairs(counts) do
  found[#found + 1], found[#found + 2] = state, count
end
return found
