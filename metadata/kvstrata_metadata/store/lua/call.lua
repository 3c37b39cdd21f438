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

