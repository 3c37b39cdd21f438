-- Remove everything of one scope from one shard, a bounded part at a time, and let nothing be written from here on.
-- ARGV: part to go on from (0 at first), keys of one part, seconds for which writes stay refused.
-- Returns blocks removed and the part to go on from, -1 when nothing is left. Every part may be repeated.
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
  local names, blocks = {}, 0
  for bucket = part, math.min(part + limit, BUCKETS / SHARDS) - 1 do
    names[#names + 1] = KEYS[1] .. 'b' .. struct.pack('>I2', first + bucket)
    blocks = blocks + call('HLEN', names[#names])
  end
  unlink(names)
  return { blocks, part + #names }
end

-- Then reverse indexes and streams of some incarnations. Nothing is counted in them: thousands may have the scope, and
-- whatever is asked of a bucket is asked 256 times of each.
local incarnations = call('HRANDFIELD', KEYS[1] .. 's', math.max(1, math.floor(limit / REVERSE_BUCKETS)))
if #incarnations > 0 then
  local tails = {}
  for bucket = 0, REVERSE_BUCKETS - 1 do
    tails[bucket + 1] = sub(reverse_key('', bucket), -2)
  end
  for _, incarnation in ipairs(incarnations) do
    local names, head = {}, KEYS[1] .. 'r' .. incarnation
    for i, tail in ipairs(tails) do
      names[i] = head .. tail
    end
    unlink(names)
  end
  call('HDEL', KEYS[1] .. 's', unpack(incarnations))
  return { 0, part }
end

-- Then sessions.
local sessions = call('ZRANGE', KEYS[1] .. 't', 0, limit - 1)
for i, digest in ipairs(sessions) do
  call('ZREM', KEYS[1] .. 't', digest)
  sessions[i] = KEYS[1] .. 'n' .. digest
end
unlink(sessions)
return { 0, #sessions == 0 and -1 or part }
