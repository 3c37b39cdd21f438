-- Put a nomination into an agent's mailbox. ARGV: packed nomination, messages that the mailbox holds at most,
-- seconds after which an unread mailbox goes. Returns 1, or 0 when the mailbox is full.
if call('LLEN', KEYS[1]) >= tonumber(ARGV[2]) then
  return 0
end
call('RPUSH', KEYS[1], ARGV[1])
call('EXPIRE', KEYS[1], ARGV[3])
return 1
