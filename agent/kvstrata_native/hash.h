/* XXH3-128 of more than 240 bytes, written from its specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): what
   does not depend on the instruction set. Input comes in stripes of 64 bytes, 16 of which make a block. */
#ifndef KVSTRATA_HASH_H
#define KVSTRATA_HASH_H

#include <stddef.h>
#include <stdint.h>

#define SECRET_BYTES 192
#define STRIPE_BYTES 64
#define BLOCK_STRIPES ((SECRET_BYTES - STRIPE_BYTES) / 8)
#define BLOCK_BYTES (BLOCK_STRIPES * STRIPE_BYTES)
#define SCRAMBLE_PRIME 0x9E3779B1 /* PRIME32_1 */

/* The eight sums of no input, and the secret that belongs to a seed. */
void begin_digest(uint64_t *sums, uint8_t *secret, uint64_t seed);

/* The digest of all sums, in canonical form. */
void merge(const uint64_t *sums, uint64_t size, const uint8_t *secret, uint8_t *digest);

#endif
