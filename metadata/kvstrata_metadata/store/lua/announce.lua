-- Apply one batch of changes of an agent to one shard. A change with tier 0 withdraws.
-- ARGV: incarnation, sequence, mode, changes (CHANGE_BYTES each). Returns the verdict of `admit`.
-- A full Redis takes the withdrawals, which free memory, and forgets the rest: the agent reports the shard again later.
local incarnation, changes = ARGV[1], ARGV[4]
local verdict = admit(incarnation, tonumber(ARGV[2]), ARGV[3])
if verdict ~= 'ok' and verdict ~= 'full' then
  return verdict
end

-- What the reverse index is to learn, by bucket: one HSET for each instead of one for each block.
local noted, touched = {}, {}

local function note(digest)
  local bucket = reverse_bucket(digest)
  local fields = noted[bucket]
  if not fields then
    fields = {}
    noted[bucket], touched[#touched + 1] = fields, bucket
  end
  fields[#fields + 1] = digest
  fields[#fields + 1] = ''
end

local function write_notes()
  if #touched == 0 then
    return
  end
  for _, bucket in ipairs(touched) do
    call('HSET', reverse_key(incarnation, bucket), unpack(noted[bucket]))
  end
  noted, touched = {}, {}
end

local function place(digest, location)
  local bucket = bucket_key(digest)
  if call('HSETNX', bucket, digest, location) == 1 then
    return
  end
  local kept = others(call('HGET', bucket, digest), incarnation)
  if #kept >= COPIES_MAX * LOCATION_BYTES then
    kept = sub(kept, -(COPIES_MAX - 1) * LOCATION_BYTES)
  end
  call('HSET', bucket, digest, kept .. location)
end

for at = 1, #changes - CHANGE_BYTES + 1, CHANGE_BYTES do
  local digest = sub(changes, at, at + DIGEST_BYTES - 1)
  if byte(changes, at + DIGEST_BYTES) == 0 then
    write_notes() -- In the order of the changes.
    retract(digest, incarnation)
  elseif verdict == 'ok' then
    place(digest, incarnation .. sub(changes, at + DIGEST_BYTES, at + CHANGE_BYTES - 1))
    note(digest)
  end
end
write_notes()
return verdict
