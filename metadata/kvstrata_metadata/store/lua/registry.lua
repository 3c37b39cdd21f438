-- Shared by the transitions of the registry of agents; joined in front of each by scripts.py.
--
-- KEYS[1] is `kf:{agents}`. Under it:
--   id              string  random name of this directory; another one means that everything was lost
--   n               string  last incarnation number given out
--   a               hash    agent -> incarnation that holds the name now
--   i               hash    incarnation -> msgpack [agent, epoch (16 hex digits), address, is fenced]
--   h               zset    incarnation by the second of its last heartbeat
--   t               string  `<term> <leader>`: the latest leader among the metadata services that has acted
--   e               hash    scope tag -> `<second> <key version> <uid of the owner>`: claims that its key is gone
--   s<incarnation>  set     shards that it may have announced to: `<scope tag>.<shard>`

local function second()
  return tonumber(call('TIME')[1])
end

-- True unless a later leader has acted: then the caller has lost its Lease and decides nothing any more.
-- The term is '' for an agent that ends itself, and where nobody is elected because there is no Kubernetes.
local function obeys(term, leader)
  if not term or term == '' then
    return true
  end
  local last, holder = string.match(call('GET', KEYS[1] .. 't') or '', '^(%d+) (.*)$')
  term, last = tonumber(term), tonumber(last or -1)
  if term < last or term == last and leader ~= holder then
    return false
  end
  if term > last then
    call('SET', KEYS[1] .. 't', string.format('%.0f %s', term, leader))
  end
  return true
end

local function is_record(it)
  if type(it) ~= 'table' or type(it[1]) ~= 'string' or type(it[2]) ~= 'string' or type(it[3]) ~= 'string' then
    return false
  end
  return type(it[4]) == 'boolean' and string.find(it[2], '^%x+$') and not string.find(it[1] .. it[3], '[^ -~]')
end

-- The record of an incarnation as a table, or nil. A rotten one is nobody's: it can be fenced and forgotten, and whoever
-- it was is told that it is unknown, and registers again.
local function known(incarnation)
  local packed = call('HGET', KEYS[1] .. 'i', incarnation)
  if not packed then
    return nil
  end
  local is_read, record = pcall(cmsgpack.unpack, packed)
  return is_read and is_record(record) and record or { '', '0', '', false }
end

-- Verdict on an incarnation that wants to act.
local function standing(incarnation)
  local record = known(incarnation)
  if not record then
    return 'unknown'
  end
  return record[4] and 'fenced' or 'ok'
end

-- From here on the incarnation may neither beat nor announce; its locations are still to be removed.
local function fence(incarnation, record)
  record[4] = true
  call('HSET', KEYS[1] .. 'i', incarnation, cmsgpack.pack(record))
  call('ZREM', KEYS[1] .. 'h', incarnation)
  if call('HGET', KEYS[1] .. 'a', record[1]) == incarnation then
    call('HDEL', KEYS[1] .. 'a', record[1])
  end
end
