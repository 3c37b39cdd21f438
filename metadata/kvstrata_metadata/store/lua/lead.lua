-- A leader says that it begins or goes on. ARGV: term, leader.
-- Returns 1 and its term, or 0 and the term of the later leader that is obeyed.
local is_obeyed = obeys(ARGV[1], ARGV[2])
return { is_obeyed and 1 or 0, tonumber(string.match(call('GET', KEYS[1] .. 't'), '^%d+')) }
