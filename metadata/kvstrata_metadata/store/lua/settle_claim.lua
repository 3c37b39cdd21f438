-- The leader has done what a claim asked for, or refused it. ARGV: scope tag, term, leader. Returns 1 when it was there.
if not obeys(ARGV[2], ARGV[3]) then
  return 0
end
return call('HDEL', KEYS[1] .. 'e', ARGV[1])
