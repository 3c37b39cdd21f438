-- Take the oldest nominations out of an agent's mailbox. ARGV: how many at most. Returns them, none when it is empty.
return call('LPOP', KEYS[1], ARGV[1]) or {}
