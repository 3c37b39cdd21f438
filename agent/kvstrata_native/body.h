/* Every kernel, once; a file for each instruction set includes it after defining LEVEL (the name of its table),
   LEVEL_NAME, TARGET (a function attribute), is_supported(), Line (64 bytes in registers) with load_line(), PIN() (from
   there on a line is what was loaded, and its source has changed, for all that the compiler knows),
   stream_line() to where a line begins, stream_quarters() to any quarter of one, and stream_end(), for the hash Lanes
   (eight sums of 64 bits) with load_lanes(), store_lanes(), accumulate() and scramble(), for top bytes sum_of() (256 of
   them) and far_below() (a bit for each of 64 that is not of the `range` values ending at `base`), FLOATS, how many of
   them a vector has, and what works on these, larger() to store_halves(). With HAS_BYTES there are split_words(),
   store_lowest_bytes() to store_marked() as well, with HAS_NIBBLES Nibbled with nibbled() and store_of_nibbles(), with
   HAS_TABLES looked_up() and looked_up_once(), with HAS_EIGHTS looked_up_eighth(), with HAS_PAIRS store_nibbles() to store_of_e4m3(): two vectors at once. */
#include <string.h>

#include "hash.h"
#include "kernels.h"

#define LINE 64 /* Bytes of a cache line, on every processor that we know of. */
#define AHEAD_BYTES 2048 /* What is fetched before the hash gets there. */

TARGET static void stream(uint8_t *into, const uint8_t *source, size_t size)
{
    size_t head = (size_t)(-(uintptr_t)into & (LINE - 1));
    if (head > size)
        head = size;
    memcpy(into, source, head);
    size_t i = head;
    for (; i + LINE <= size; i += LINE)
        stream_line(into + i, load_line(source + i));
    memcpy(into + i, source + i, size - i);
}

TARGET static void copy(uint8_t *into, const uint8_t *source, size_t size)
{
    stream(into, source, size);
    stream_end();
}

/* `count` whole blocks of the hash's input. `ahead` is fetched meanwhile, as far as the input goes. */
TARGET static void add_blocks(uint64_t *sums, const uint8_t *input, size_t count, const uint8_t *secret,
                              const uint8_t *ahead)
{
    Lanes lanes = load_lanes(sums);
    for (size_t block = 0; block < count; block++) {
        for (int stripe = 0; stripe < BLOCK_STRIPES; stripe++, input += STRIPE_BYTES, ahead += STRIPE_BYTES) {
            __builtin_prefetch(ahead);
            lanes = accumulate(lanes, load_line(input), secret + 8 * stripe);
        }
        lanes = scramble(lanes, secret + SECRET_BYTES - STRIPE_BYTES);
    }
    store_lanes(sums, lanes);
}

/* What follows the whole blocks: 1 to BLOCK_BYTES bytes at `last`. Its last 64 bytes may reach back before it. */
TARGET static void end_digest(uint64_t *sums, const uint8_t *last, size_t left, size_t size, const uint8_t *secret,
                              uint8_t *digest)
{
    Lanes lanes = load_lanes(sums);
    for (size_t stripe = 0; stripe < (left - 1) / STRIPE_BYTES; stripe++)
        lanes = accumulate(lanes, load_line(last + STRIPE_BYTES * stripe), secret + 8 * stripe);
    lanes = accumulate(lanes, load_line(last + left - STRIPE_BYTES), secret + SECRET_BYTES - STRIPE_BYTES - 7);
    store_lanes(sums, lanes);
    merge(sums, size, secret, digest);
}

TARGET static void digest(const uint8_t *source, size_t size, uint64_t seed, uint8_t *into)
{
    uint8_t secret[SECRET_BYTES];
    size_t whole = (size - 1) / BLOCK_BYTES;
    uint64_t sums[8];
    begin_digest(sums, secret, seed);
    add_blocks(sums, source, whole, secret, source + AHEAD_BYTES);
    end_digest(sums, source + whole * BLOCK_BYTES, size - whole * BLOCK_BYTES, size, secret, into);
}

#define STAGE_BYTES (4 * BLOCK_BYTES) /* Stays in the first cache. */

/* As add_blocks, and each line goes from its registers past the caches to `into`, which begins with a quarter of one:
   what an allocator hands out does. Nowhere, where `is_kept` is not. `number` is 1 or 2 seeds' sums; known where this is
   inlined, all stay in registers. */
TARGET static inline __attribute__((always_inline)) void
stream_blocks(uint64_t sums[][8], uint8_t *into, const uint8_t *source, size_t count, uint8_t secrets[][SECRET_BYTES],
              int number, int is_kept)
{
    int is_aligned = (uintptr_t)into % LINE == 0, last = number - 1;
    Lanes lanes = load_lanes(sums[0]), others = load_lanes(sums[last]);
    for (size_t block = 0; block < count; block++) {
        for (int stripe = 0; stripe < BLOCK_STRIPES; stripe++, source += STRIPE_BYTES) {
            __builtin_prefetch(source + AHEAD_BYTES);
            Line line = load_line(source);
            PIN(line); /* What is hashed and written is made of this reading, never of a second one. */
            if (is_kept) {
                if (is_aligned)
                    stream_line(into, line);
                else
                    stream_quarters(into, line);
                into += STRIPE_BYTES;
            }
            lanes = accumulate(lanes, line, secrets[0] + 8 * stripe);
            if (last)
                others = accumulate(others, line, secrets[last] + 8 * stripe);
        }
        lanes = scramble(lanes, secrets[0] + SECRET_BYTES - STRIPE_BYTES);
        if (last)
            others = scramble(others, secrets[last] + SECRET_BYTES - STRIPE_BYTES);
    }
    store_lanes(sums[0], lanes);
    if (last)
        store_lanes(sums[last], others);
}

/* `into` may be NULL: nothing is copied then, and the digests are of one reading all the same. */
TARGET static void copy_digests(uint8_t *into, const uint8_t *source, size_t size, const uint64_t *seeds, int count,
                                int is_streamed, uint8_t *digests)
{
    uint8_t secrets[DIGESTS_MOST][SECRET_BYTES], staged[LINE + STAGE_BYTES] __attribute__((aligned(LINE)));
    uint8_t *stage = staged + LINE; /* Before it stands the end of the last stage. */
    uint64_t sums[DIGESTS_MOST][8];
    for (int i = 0; i < count; i++)
        begin_digest(sums[i], secrets[i], seeds[i]);
    /* What is left has a line at least: the digest's last line never reaches back to what was streamed. */
    int is_straight = into == NULL || (is_streamed && (uintptr_t)into % (LINE / 4) == 0);
    size_t straight = is_straight ? (size - LINE) / BLOCK_BYTES : 0;
    if (count == 1)
        stream_blocks(sums, into, source, straight, secrets, 1, into != NULL);
    else if (into != NULL)
        stream_blocks(sums, into, source, straight, secrets, 2, 1);
    else
        stream_blocks(sums, into, source, straight, secrets, 2, 0);
    for (size_t at = straight * BLOCK_BYTES, here; at < size; at += here) {
        int is_last = size - at <= STAGE_BYTES;
        here = is_last ? size - at : STAGE_BYTES;
        memcpy(stage, source + at, here);
        __asm__ volatile("" ::: "memory"); /* From here on the source has changed, for all that the compiler knows. */
        if (is_streamed)
            stream(into + at, stage, here);
        else if (into != NULL)
            memcpy(into + at, stage, here);
        size_t whole = (here - is_last) / BLOCK_BYTES;
        for (int i = 0; i < count; i++)
            add_blocks(sums[i], stage, whole, secrets[i], source + at + here);
        for (int i = 0; is_last && i < count; i++)
            end_digest(sums[i], stage + whole * BLOCK_BYTES, here - whole * BLOCK_BYTES, size, secrets[i],
                       digests + i * DIGEST_BYTES);
        memcpy(staged, stage + STAGE_BYTES - LINE, LINE);
    }
    stream_end();
}

#include "body_packing.h"
#include "body_tops.h"

#include "body_coding.h"

#include "body_measured.h"

#include "body_bounded.h"

#include "body_rotated.h"

#include "body_mix.h"

const Kernels LEVEL = {
    .name = LEVEL_NAME,
    .is_supported = is_supported,
    .copy = copy,
    .digest = digest,
    .copy_digests = copy_digests,
    .width_of = width_of,
    .narrow = narrow,
    .widen = widen,
    .mix = mix,
    .unmix = unmix,
    .pack = pack,
    .unpack = unpack,
};
