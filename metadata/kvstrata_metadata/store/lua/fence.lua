-- Fence an incarnation that was seen silent, unless it has beaten since.
-- ARGV: incarnation, seconds of silence that were seen, term, leader. Returns `ok`, `alive`, `unknown` or `deposed`.
if not obeys(ARGV[3], ARGV[4]) then
  return 'deposed'
end
local record = known(ARGV[1])
if not record then
  return 'unknown'
end
local beat = call('ZSCORE', KEYS[1] .. 'h', ARGV[1])
if beat and second() - tonumber(beat) < tonumber(ARGV[2]) then
  return 'alive'
end
fence(ARGV[1], record)
return 'ok'
