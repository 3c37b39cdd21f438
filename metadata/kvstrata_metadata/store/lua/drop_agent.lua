-- The sweeper removes a fenced incarnation's locations from one shard, a chunk at a time.
-- The tombstone comes first: whatever the incarnation still sends is refused from here on.
-- Where nobody else is left the tombstones end by themselves: whoever leads then may not know the shard.
-- ARGV: incarnation, reverse bucket to start at, limit, seconds for which a tombstone is kept.
-- Returns removed, bucket to go on from.
call('HSET', KEYS[1] .. 's', ARGV[1], 'x ' .. second())
local removed, bucket = remove(ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]))
if bucket == REVERSE_BUCKETS and not has_streams() then
  call('EXPIRE', KEYS[1] .. 's', ARGV[4])
end
return { removed, bucket }
