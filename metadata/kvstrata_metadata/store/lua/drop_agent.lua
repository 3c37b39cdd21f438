-- The sweeper removes a fenced incarnation's locations from one shard, a chunk at a time.
-- The tombstone comes first: whatever the incarnation still sends is refused from here on.
-- ARGV: incarnation, reverse bucket to start at, limit. Returns removed, bucket to go on from.
call('HSET', KEYS[1] .. 's', ARGV[1], 'x ' .. second())
return { remove(ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])) }
