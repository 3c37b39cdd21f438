-- Forget a fenced incarnation of which nothing is left in any shard. ARGV: incarnation, term, leader.
-- Returns 1 when it was there.
local record = obeys(ARGV[2], ARGV[3]) and known(ARGV[1])
if not record or not record[4] then
  return 0
end
call('DEL', KEYS[1] .. 's' .. ARGV[1])
return call('HDEL', KEYS[1] .. 'i', ARGV[1])
