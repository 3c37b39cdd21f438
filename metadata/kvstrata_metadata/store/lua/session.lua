-- Open, touch, close or read one session of a scope. Records expire when nobody touches them, their index with the last.
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
  call('EXPIRE', KEYS[1] .. 't', ARGV[3])
end
return packed
