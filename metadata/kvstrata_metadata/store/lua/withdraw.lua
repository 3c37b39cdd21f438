-- An agent removes its own locations from one shard, a chunk at a time, before it reports the shard again.
-- ARGV: incarnation, sequence, reverse bucket to start at, limit. Returns verdict, removed, bucket to go on from.
-- A later chunk must follow the one before: a failover may have lost what that one removed.
local from = tonumber(ARGV[3])
local verdict = admit(ARGV[1], tonumber(ARGV[2]), from == 0 and 'withdraw' or 'continue')
if verdict ~= 'ok' then
  return { verdict, 0, REVERSE_BUCKETS }
end
local removed, bucket = remove(ARGV[1], from, tonumber(ARGV[4]))
return { verdict, removed, bucket }
