-- Read the locations of blocks. ARGV: digests, DIGEST_BYTES each. Returns one string for each, empty when unknown.
local digests, found = ARGV[1], {}
for at = 1, #digests - DIGEST_BYTES + 1, DIGEST_BYTES do
  local digest = sub(digests, at, at + DIGEST_BYTES - 1)
  found[#found + 1] = call('HGET', bucket_key(digest), digest) or ''
end
return found
