"""The connection to Redis: keys, packed values, Lua transitions, who may run what. Knows no duty."""
