-- The commands of Redis that our transitions use, over plain tables, with a log of effects for lost writes.
-- SIM.run(sha, key, ...) runs a transition atomically; SIM.lose(n) forgets the effects of the last n transitions.
SIM = { seconds = '0', microseconds = '0' }
local db, log, starts, scripts = {}, {}, {}, {}

local function text(value)
  local kind = type(value)
  if kind == 'string' then
    return value
  end
  assert(kind == 'number', 'redis takes strings and numbers')
  return string.format('%.17g', value)
end

local function holder(key, kind, make)
  local found = db[key]
  if not found and make then
    found = { kind = kind, n = 0, v = {} }
    db[key] = found
  end
  if found and found.kind ~= kind then
    error('WRONGTYPE ' .. key)
  end
  return found
end

local function put(found, field, value)
  if found.v[field] == nil then
    found.n = found.n + 1
  end
  found.v[field] = value
end

local function cut(key, found, field)
  if not found or found.v[field] == nil then
    return 0
  end
  found.v[field] = nil
  found.n = found.n - 1
  if found.n == 0 then
    db[key] = nil
  end
  return 1
end

local function sorted(found)
  local names = {}
  if found then
    for name in pairs(found.v) do
      names[#names + 1] = name
    end
    table.sort(names)
  end
  return names
end

local reads, writes = {}, {}

function reads.TIME()
  return { SIM.seconds, SIM.microseconds }
end
function reads.GET(key)
  local found = holder(key, 'string')
  return found and found.v or false
end
function reads.EXISTS(key)
  return db[key] and 1 or 0
end
function reads.HGET(key, field)
  local found = holder(key, 'hash')
  return found and found.v[field] or false
end
function reads.HMGET(key, ...)
  local out = {}
  for i, field in ipairs({ ... }) do
    out[i] = reads.HGET(key, field)
  end
  return out
end
function reads.HEXISTS(key, field)
  return reads.HGET(key, field) and 1 or 0
end
function reads.HLEN(key)
  local found = holder(key, 'hash')
  return found and found.n or 0
end
function reads.HKEYS(key)
  return sorted(holder(key, 'hash'))
end
function reads.HGETALL(key)
  if not db[key] then
    return {}
  end
  local found, out = holder(key, 'hash'), {}
  for _, name in ipairs(sorted(found)) do
    out[#out + 1] = name
    out[#out + 1] = found.v[name]
  end
  return out
end
local none = {}
function reads.HRANDFIELD(key, count)
  local found = db[key]
  if not found then
    return count and none or false
  end
  local names = sorted(found)
  if not count then
    return names[1]
  end
  for i = #names, tonumber(count) + 1, -1 do
    names[i] = nil
  end
  return names
end
function reads.SMEMBERS(key)
  return sorted(holder(key, 'set'))
end
function reads.SISMEMBER(key, member)
  local found = holder(key, 'set')
  return found and found.v[member] and 1 or 0
end
function reads.SCARD(key)
  local found = holder(key, 'set')
  return found and found.n or 0
end
function reads.ZSCORE(key, member)
  local found = holder(key, 'zset')
  return found and found.v[member] or false
end
function reads.ZCARD(key)
  local found = holder(key, 'zset')
  return found and found.n or 0
end
function reads.ZRANGEBYSCORE(key, low, high)
  local found, out = holder(key, 'zset'), {}
  local from, to = low == '-inf' and -math.huge or tonumber(low), high == '+inf' and math.huge or tonumber(high)
  for _, member in ipairs(sorted(found)) do
    local score = tonumber(found.v[member])
    if score >= from and score <= to then
      out[#out + 1] = member
    end
  end
  table.sort(out, function(a, b)
    local x, y = tonumber(found.v[a]), tonumber(found.v[b])
    return x < y or x == y and a < b
  end)
  return out
end

function reads.ZRANGE(key, from, to, by)
  if by == 'BYSCORE' then
    return reads.ZRANGEBYSCORE(key, from, to)
  end
  local all, out = reads.ZRANGEBYSCORE(key, '-inf', '+inf'), {}
  from, to = tonumber(from), tonumber(to)
  for i = from < 0 and #all + from or from, to < 0 and #all + to or to do
    out[#out + 1] = all[i + 1]
  end
  return out
end
function reads.LLEN(key)
  local found = holder(key, 'list')
  return found and #found.v or 0
end
function reads.LRANGE(key, from, to)
  local found, out = holder(key, 'list'), {}
  for i = tonumber(from), tonumber(to) < 0 and 1e6 or tonumber(to) do
    out[#out + 1] = found and found.v[i + 1]
  end
  return out
end

function writes.RPUSH(key, ...)
  local found = holder(key, 'list', true)
  for _, value in ipairs({ ... }) do
    found.v[#found.v + 1] = value
  end
  return #found.v
end
function writes.LPOP(key, count)
  local found, out = holder(key, 'list'), {}
  if not found then
    return false
  end
  for _ = 1, tonumber(count or 1) do
    out[#out + 1] = table.remove(found.v, 1)
  end
  if #found.v == 0 then
    db[key] = nil
  end
  return count and out or out[1]
end
function writes.HSETNX(key, field, value)
  local found = holder(key, 'hash', true)
  if found.v[field] ~= nil then
    return 0
  end
  put(found, field, value)
  return 1
end
function writes.ZREMRANGEBYSCORE(key, low, high)
  local doomed = reads.ZRANGEBYSCORE(key, low, high)
  for _, member in ipairs(doomed) do
    cut(key, holder(key, 'zset'), member)
  end
  return #doomed
end
function writes.SET(key, value)
  db[key] = { kind = 'string', n = 1, v = value }
  return { ok = 'OK' }
end
function writes.SETNX(key, value)
  if db[key] then
    return 0
  end
  writes.SET(key, value)
  return 1
end
function writes.INCR(key)
  local number = tonumber(reads.GET(key) or 0) + 1
  writes.SET(key, string.format('%.0f', number))
  return number
end
function writes.DEL(...)
  local count = 0
  for _, key in ipairs({ ... }) do
    count = count + (db[key] and 1 or 0)
    db[key] = nil
  end
  return count
end
writes.UNLINK = writes.DEL
function writes.EXPIRE()
  return 1 -- Hours or days, against the minutes of a run.
end
function writes.HSET(key, ...)
  local found, given = holder(key, 'hash', true), { ... }
  local before = found.n
  for i = 1, #given, 2 do
    put(found, given[i], given[i + 1])
  end
  return found.n - before
end
function writes.HDEL(key, ...)
  local count = 0
  for _, field in ipairs({ ... }) do
    count = count + cut(key, holder(key, 'hash'), field)
  end
  return count
end
function writes.SADD(key, ...)
  local found = holder(key, 'set', true)
  local before = found.n
  for _, member in ipairs({ ... }) do
    put(found, member, '1')
  end
  return found.n - before
end
function writes.SREM(key, ...)
  local count = 0
  for _, member in ipairs({ ... }) do
    count = count + cut(key, holder(key, 'set'), member)
  end
  return count
end
function writes.ZADD(key, ...)
  local found, given = holder(key, 'zset', true), { ... }
  local before = found.n
  for i = 1, #given, 2 do
    put(found, given[i + 1], given[i])
  end
  return found.n - before
end
function writes.ZREM(key, ...)
  local count = 0
  for _, member in ipairs({ ... }) do
    count = count + cut(key, holder(key, 'zset'), member)
  end
  return count
end

-- The keys that are there: whoever erases a scope names thousands that are not, and a replay need not do so again.
local function present(keys)
  local found = {}
  for _, key in ipairs(keys) do
    if db[key] then
      found[#found + 1] = key
    end
  end
  return found
end

redis = {}
function redis.call(name, ...)
  local read = reads[name]
  if read then
    return read(...)
  end
  local write = writes[name] or error('a command that the simulated Redis lacks: ' .. name)
  local given = { ... }
  for i = 1, #given do
    given[i] = text(given[i])
  end
  if write == writes.DEL then
    given = present(given)
  end
  log[#log + 1] = { write, given }
  return write(unpack(given))
end
redis.pcall = redis.call
function redis.status_reply(status)
  return { ok = status }
end
function redis.error_reply(message)
  error(message)
end
function redis.setresp() end
function redis.replicate_commands()
  return true
end

struct = {}
function struct.pack(form, number)
  if form == '>I2' then -- Nearly all: names of buckets.
    return string.char(math.floor(number / 256) % 256, number % 256)
  end
  local size = assert(tonumber(string.match(form, '^>I(%d)$')), 'struct.pack of ' .. form)
  local out = {}
  for i = size, 1, -1 do
    out[i] = string.char(number % 256)
    number = math.floor(number / 256)
  end
  return table.concat(out)
end

function struct.unpack(form, data, at)
  local size = assert(tonumber(string.match(form, '^>I(%d)$')), 'struct.unpack of ' .. form)
  local value = 0
  for i = at or 1, (at or 1) + size - 1 do
    value = value * 256 + string.byte(data, i)
  end
  return value
end

cmsgpack = {}
local function big(number, size)
  return struct.pack('>I' .. size, number)
end
local function packed(value)
  local kind = type(value)
  if kind == 'boolean' then
    return value and '\195' or '\194'
  elseif kind == 'string' then
    if #value < 32 then
      return string.char(160 + #value) .. value
    end
    return '\218' .. big(#value, 2) .. value
  elseif kind == 'number' then
    if value >= 0 and value < 128 and value % 1 == 0 then
      return string.char(value)
    elseif value >= 0 and value < 4294967296 and value % 1 == 0 then
      return '\206' .. big(value, 4)
    end
    return '\203' .. SIM.double(value)
  end
  assert(kind == 'table' and #value < 16, 'cmsgpack.pack of ' .. kind)
  local out = { string.char(144 + #value) }
  for i = 1, #value do
    out[i + 1] = packed(value[i])
  end
  return table.concat(out)
end
cmsgpack.pack = packed

local function number(data, at, size)
  local value = 0
  for i = at, at + size - 1 do
    value = value * 256 + string.byte(data, i)
  end
  return value
end
local function unpacked(data, at)
  local tag = string.byte(data, at)
  if tag < 128 then
    return tag, at + 1
  elseif tag >= 144 and tag < 160 then
    local out, next = {}, at + 1
    for i = 1, tag - 144 do
      out[i], next = unpacked(data, next)
    end
    return out, next
  elseif tag >= 160 and tag < 192 then
    return string.sub(data, at + 1, at + tag - 160), at + 1 + tag - 160
  elseif tag == 194 or tag == 195 then
    return tag == 195, at + 1
  elseif tag == 217 or tag == 218 then
    local wide = tag - 216
    local size = number(data, at + 1, wide)
    return string.sub(data, at + 1 + wide, at + wide + size), at + 1 + wide + size
  elseif tag == 204 or tag == 205 or tag == 206 then
    local wide = 2 ^ (tag - 204)
    return number(data, at + 1, wide), at + 1 + wide
  elseif tag == 203 then
    return SIM.undouble(string.sub(data, at + 1, at + 8)), at + 9
  end
  error('cmsgpack.unpack of tag ' .. tag)
end
function cmsgpack.unpack(data)
  local value = unpacked(data, 1)
  return value
end

function SIM.load(sha, source)
  scripts[sha] = assert(loadstring(source))
end
function SIM.flush()
  db, log, starts = {}, {}, {}
  collectgarbage('collect')
  collectgarbage('setpause', 400) -- Seldom: nearly all that is made stays in the log.
end
function SIM.run(sha, key, ...)
  starts[#starts + 1] = #log
  KEYS, ARGV = { key }, { ... }
  return scripts[sha]()
end
function SIM.lose(count)
  local first = starts[math.max(1, #starts - count + 1)] or 0
  local kept = {}
  for i = 1, first do
    kept[i] = log[i]
  end
  local lost = #log - first
  db, log, starts = {}, kept, { 0 }
  for _, effect in ipairs(log) do
    effect[1](unpack(effect[2]))
  end
  return lost
end
function SIM.names()
  local names = {}
  for name in pairs(db) do
    names[#names + 1] = name
  end
  table.sort(names)
  return names
end
function SIM.command(name, ...)
  return redis.call(name, ...)
end
