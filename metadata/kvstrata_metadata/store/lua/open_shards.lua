-- Note shards before the first announcement to them, so that the sweeper finds what it must clean.
-- ARGV: incarnation, shards. Returns `ok`, `fenced` or `unknown`.
local verdict = standing(ARGV[1])
if verdict == 'ok' then
  call('SADD', KEYS[1] .. 's' .. ARGV[1], unpack(ARGV, 2))
end
return verdict
