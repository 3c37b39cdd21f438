-- Count the locations of incarnations in one shard. ARGV: incarnations. Returns one number for each.
local counts = {}
for i, incarnation in ipairs(ARGV) do
  local count = 0
  for bucket = 0, REVERSE_BUCKETS - 1 do
    count = count + call('HLEN', reverse_key(incarnation, bucket))
  end
  counts[i] = count
end
return counts
