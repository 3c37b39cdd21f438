-- An agent says that the key of a scope is gone. The leader asks the API server before it believes that.
-- ARGV: scope tag, uid of the tenant or domain, key version. Returns 1 when nobody had said so before.
return call('HSETNX', KEYS[1] .. 'e', ARGV[1], string.format('%.0f %s %s', second(), ARGV[3], ARGV[2]))
