-- Look at a part of one shard's buckets: what each incarnation has in each tier, and which blocks have many copies.
-- ARGV: bucket to begin at, locations after which to stop, copies that are not many, blocks to name at most.
-- Returns the bucket to go on from (-1 at the end), totals (incarnation and tier, locations, bytes, for each) and
-- blocks (digest, locations, for each).
local TIER_AT, BYTES_AT = INCARNATION_BYTES + 1, 13
local first = tonumber(string.match(KEYS[1], '%.(%x)}$'), 16) * BUCKETS / SHARDS
local limit, many, blocks_max = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local counts, bytes, blocks, seen = {}, {}, {}, 0

local function add(value)
  for at = 1, #value - LOCATION_BYTES + 1, LOCATION_BYTES do
    local holder = sub(value, at, at + TIER_AT - 1)
    counts[holder] = (counts[holder] or 0) + 1
    bytes[holder] = (bytes[holder] or 0) + struct.unpack('>I4', value, at + BYTES_AT - 1)
    seen = seen + 1
  end
end

local bucket = tonumber(ARGV[1])
while bucket < BUCKETS / SHARDS and seen < limit do
  local all = call('HGETALL', KEYS[1] .. 'b' .. struct.pack('>I2', first + bucket))
  for i = 1, #all, 2 do
    add(all[i + 1])
    if #all[i + 1] > many * LOCATION_BYTES and #blocks < 2 * blocks_max then
      blocks[#blocks + 1], blocks[#blocks + 2] = all[i], all[i + 1]
    end
  end
  bucket = bucket + 1
end

local totals = {}
for holder, count in pairs(counts) do
  totals[#totals + 1], totals[#totals + 2], totals[#totals + 3] = holder, count, bytes[holder]
end
return { bucket < BUCKETS / SHARDS and bucket or -1, totals, blocks }
