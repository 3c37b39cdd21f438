-- Remove everything of one scope from one shard, a bounded part at a time, and let nothing be written from here on.
-- ARGV: part to go on from (0 at first), keys of one part, seconds for which writes stay refused.
-- Returns locations removed and the part to go on from, -1 when nothing is left. Every part may be repeated.
local part, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
call('SET', KEYS[1] .. 'x', second(), 'EX', ARGV[3])

local function unlink(names)
  if #names > 0 then
    call('UNLINK', unpack(names))
  end
end

-- First the buckets, by their numbers: this is what readers find.
local first = tonumber(string.match(KEYS[1], '%.(%x)}$'), 16) * BUCKETS / SHARDS
if part < BUCKETS / SHARDS then
  local names = {}
  for bucket = part, math.min(part + limit, BUCKETS / SHARDS) - 1 do
    names[#names + 1] = KEYS[1] .. 'b' .. struct.pack('>I2', first + bucket)
  end
  unlink(names)
  return { 0, part + #names }
end

-- Then one incarnation's reverse index and stream.
local incarnation = call('HRANDFIELD', KEYS[1] .. 's')
if incarnation then
  local names, removed = {}, 0
  for bucket = 0, REVERSE_BUCKETS - 1 do
    names[#names + 1] = reverse_key(incarnation, bucket)
    removed = removed + call('HLEN', names[#names])
  end
  unlink(names)
  call('HDEL', KEYS[1] .. 's', incarnation)
  return { removed, part }
end

-- Then sessions.
local sessions = call('ZRANGE', KEYS[1] .. 't', 0, limit - 1)
for i, digest in ipairs(sessions) do
  call('ZREM', KEYS[1] .. 't', digest)
  sessions[i] = KEYS[1] .. 'n' .. digest
end
unlink(sessions)
return { 0, #sessions == 0 and -1 or part }
