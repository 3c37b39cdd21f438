-- Say that an incarnation lives. ARGV: incarnation, and for whom: agent, epoch. Returns `ok`, `fenced` or `unknown`.
local record = known(ARGV[1])
if record and ARGV[2] and (record[1] ~= ARGV[2] or record[2] ~= ARGV[3]) then
  return 'unknown'
end
local verdict = standing(ARGV[1])
if verdict == 'ok' then
  call('ZADD', KEYS[1] .. 'h', second(), ARGV[1])
end
return verdict
