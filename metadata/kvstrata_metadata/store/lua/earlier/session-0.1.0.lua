-- Joined in front of the other definitions of every transition by scripts.py.

-- Run a command on a key. One of another type than ours is rotten, and nobody could ever use it again: it goes, and the
-- command finds nothing there. Agents tell anew what they hold, and a record is written again by its next change.
local function call(command, ...)
  local reply = redis.pcall(command, ...)
  if type(reply) ~= 'table' or not reply.err then
    return reply
  end
  if string.find(reply.err, 'WRONGTYPE', 1, true) ~= 1 then
    return error(reply)
  end
  redis.call('DEL', (...))
  return redis.call(command, ...)
end

-- Shared by the transitions of one scope shard; joined in front of each by scripts.py.
--
-- KEYS[1] is the shard's prefix, `kf:{<scope tag>.<shard>}`. Under it:
--   b<2 bytes of digest>               hash  digest -> locations, newest last, LOCATION_BYTES each
--   r<incarnation><2 chars of bucket>  hash  digest -> ''     reverse index: what one incarnation announced
--   s                                  hash  incarnation -> `<last sequence> <second seen>` or `x <second fenced>`
--   n<session digest>                  string, a session record
--   t                                  zset   session digest by the second of its last change
--   x                                  string second in which the scope was erased; nothing is written from then on
local sub, byte = string.sub, string.byte
local SHARD = KEYS[1]

local DIGEST_BYTES = 20
local INCARNATION_BYTES = 5
local LOCATION_BYTES = 18 -- incarnation 5, tier 1, stamp 6, stored bytes 4, CRC 2: records.py
local CHANGE_BYTES = 33 -- digest 20, then a location without its incarnation
local COPIES_MAX = 16 -- Newest copies of one block that are kept; a reader needs a few, a popular block has thousands.
local SHARDS = 16
local BUCKETS = 65536 -- Names of two bytes; a shard has the sixteenth that begins with its digit.
local REVERSE_BUCKETS = 256 -- An agent with a million blocks in a scope has 244 in each: short to search, few bytes a key.

local function second()
  return call('TIME')[1]
end

local function is_erased()
  return call('EXISTS', SHARD .. 'x') == 1
end

local BUCKET = SHARD .. 'b'

local function bucket_key(digest)
  return BUCKET .. sub(digest, 1, 2)
end

local function reverse_key(incarnation, bucket)
  return SHARD .. 'r' .. incarnation .. string.format('%02x', bucket)
end

-- Bucket of the reverse index: 8 bits that the forward bucket does not use.
local function reverse_bucket(digest)
  return byte(digest, 3)
end

-- Locations in `value` that are not of `incarnation`. A value of a wrong length is corrupt and holds none.
local function others(value, incarnation)
  if not value or #value % LOCATION_BYTES ~= 0 then
    return ''
  end
  local kept = ''
  for at = 1, #value, LOCATION_BYTES do
    if sub(value, at, at + INCARNATION_BYTES - 1) ~= incarnation then
      kept = kept .. sub(value, at, at + LOCATION_BYTES - 1)
    end
  end
  return kept
end

-- Take one location of `incarnation` out. Where a full Redis refuses that, both indexes keep it.
local function retract(digest, incarnation)
  local kept = others(call('HGET', bucket_key(digest), digest), incarnation)
  if kept == '' then
    call('HDEL', bucket_key(digest), digest)
  elseif type(redis.pcall('HSET', bucket_key(digest), digest, kept)) ~= 'number' then
    return
  end
  call('HDEL', reverse_key(incarnation, reverse_bucket(digest)), digest)
end

-- Decide whether message `sequence` of a stream is the next one, and remember it when it is.
--
-- Modes: `continue` follows the last message; `withdraw` begins a removal of everything, whatever was last; `reset`
-- starts anew, in an untouched shard or right behind the last message of a removal, which a failover may have lost;
-- `check` changes nothing and compares the last sequence. Answers `ok`, `old` (seen before: ignore), `gap` (report the shard again), `fenced`,
-- `erased` (the scope is no more) or `full` (no memory: nothing was remembered; withdrawals alone may be applied).
local function admit(incarnation, sequence, mode)
  if is_erased() then
    return 'erased'
  end
  local state = call('HGET', SHARD .. 's', incarnation)
  local last = state and string.match(state, '^(%w+) %d+$')
  if last == 'x' then
    return 'fenced'
  end
  last = tonumber(last)
  local follows = sequence <= (last or 0) + 1
  if mode == 'check' and last ~= sequence or mode == 'continue' and not (last and follows) then
    return 'gap'
  end
  if mode == 'reset' and last and not follows then
    return 'gap'
  end
  if mode ~= 'check' and last and sequence <= last then
    return 'old'
  end
  local noted = redis.pcall('HSET', SHARD .. 's', incarnation, string.format('%.0f %s', sequence, second()))
  if type(noted) == 'number' then
    return 'ok'
  end
  if string.find(noted.err, 'OOM', 1, true) then
    return mode == 'check' and 'ok' or 'full' -- What was asked is known; only that it was asked is not remembered.
  end
  return error(noted)
end

-- Remove up to `limit` locations of `incarnation`, starting at reverse bucket `from`.
-- Returns how many, and the bucket to go on from: REVERSE_BUCKETS when all are gone.
local function remove(incarnation, from, limit)
  local removed = 0
  for bucket = from, REVERSE_BUCKETS - 1 do
    local key = reverse_key(incarnation, bucket)
    local digests = call('HRANDFIELD', key, limit - removed)
    for _, digest in ipairs(digests) do
      retract(digest, incarnation)
    end
    removed = removed + #digests
    if removed >= limit then
      return removed, bucket
    end
  end
  return removed, REVERSE_BUCKETS
end
-- Open, touch, close or read one session of a scope. Records expire when nobody touches them.
-- ARGV: verb, session digest, seconds to live, record (msgpack array, `open`) or changed fields (`touch`).
-- Sessions of an erased scope are gone and cannot be opened.
-- Fields: tenant, priority, state, parent, head, agent, urgency, expected_return_s. Returns the record now, or ''.
local STATE, HEAD, AGENT, URGENCY, EXPECTED = 3, 5, 6, 7, 8
local verb, key = ARGV[1], KEYS[1] .. 'n' .. ARGV[2]
local packed = call('GET', key)
if verb == 'close' then
  call('DEL', key)
  call('ZREM', KEYS[1] .. 't', ARGV[2])
  return packed or ''
end
if verb ~= 'read' and is_erased() then
  return ''
end
if verb == 'open' then
  packed = ARGV[4]
elseif not packed then
  return ''
elseif verb == 'touch' then
  local is_read, record = pcall(cmsgpack.unpack, packed)
  if not is_read or type(record) ~= 'table' then
    return ''
  end
  local change = cmsgpack.unpack(ARGV[4])
  record[STATE], record[URGENCY], record[EXPECTED] = change[1], change[2], change[3]
  if change[4] ~= '' then
    record[HEAD], record[AGENT] = change[4], change[5]
  end
  packed = cmsgpack.pack(record)
end
if verb ~= 'read' then
  call('SET', key, packed, 'EX', ARGV[3])
  call('ZADD', KEYS[1] .. 't', second(), ARGV[2])
end
return packed
