/* What the module calls, for each instruction set. Plain C: no Python, no allocation, no threads.

   Memory that is copied or hashed may be written by others meanwhile, or become zeros half-way; a kernel then ends
   like any other time, with whatever it read. */
#ifndef KVSTRATA_KERNELS_H
#define KVSTRATA_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define HASHED_FROM_BYTES 241 /* XXH3 has other rules for less; those are left to the xxhash package. */
#define DIGEST_BYTES 16
#define DIGESTS_MOST 2

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "formats and hashes are read as little-endian words; big-endian machines take the Python kernels"
#endif

enum { FP8, INT8, INT4 }; /* In the order of forms.py. */
enum {
    INT4_ROW, INT4_COLUMN, FP8_ROW, INT8_ROW, INT8_COLUMN, EXACT, AS_IT_IS, ROTATED_4, ROTATED_5, ROTATED_6, ROTATED_8,
    RUNGS
}; /* In the order of forms.py. */

#define HEAD_BYTES 4            /* Of a plane: its length, and its rung in the top byte. */
#define PLANE_BYTES_MOST 0xFFFF00 /* Of one plane; its length has to fit into a head. */

/* A block of planes of rows of columns. */
typedef struct {
    size_t planes, rows, columns;
    int width, is_rotated; /* Whether rotated planes are tried. */
    double limit;
} Mixing;

#define STRIP_BYTES 256 /* Top bytes that share a base; a position in a strip is one byte. */
enum { WIDTH_LEAST = 3, WIDTH_MOST = 7 }; /* Bits of a top byte's code. */

/* Elements by rows, of one token each, and how they share scales. */
typedef struct {
    int kind, is_by_column;
    size_t rows, columns, group;
} Grid;

/* Rows of runs that are mixed, in codes of some bits. */
typedef struct {
    int bits;
    size_t rows, columns, run;
} Rotation;

typedef struct {
    const char *name;
    int (*is_supported)(void);
    void (*copy)(uint8_t *into, const uint8_t *source, size_t size);
    /* Past the caches: for blocks that nobody reads soon. The ranges do not overlap. */
    void (*digest)(const uint8_t *source, size_t size, uint64_t seed, uint8_t *digest);
    /* XXH3-128 in canonical form. */
    void (*copy_digests)(uint8_t *into, const uint8_t *source, size_t size, const uint64_t *seeds, int count,
                         int is_streamed, uint8_t *digests);
    /* All in one pass: each byte is read once, and what was read is what is written and hashed, under each of at most
       DIGESTS_MOST seeds. Without `into` nothing is written. */
    int (*width_of)(const uint8_t *source, size_t size, int element_bytes);
    /* Bits of a code that make a block of elements of 1, 2 or 4 bytes short. */
    size_t (*narrow)(uint8_t *into, const uint8_t *source, size_t size, int element_bytes, int width);
    /* Fills at most `size` bytes and two for each strip; returns how many. */
    int (*widen)(uint8_t *into, size_t size, const uint8_t *stored, size_t stored_bytes, int element_bytes, int width);
    /* Any stored bytes: 0 where they are none of `narrow`; what was filled means nothing then. */
    int (*pack)(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x);
    void (*unpack)(const Grid *grid, uint16_t *x, const uint8_t *codes, const uint16_t *scales);
    /* bf16 to codes and scales; 0 where a value is not finite, or too large to come back. */
    size_t (*mix)(uint8_t *into, const uint16_t *source, const Mixing *mixing, uint8_t *rungs, double *errors);
    /* Each plane in the first form from its rung on whose error is within the limit; returns how many bytes it filled. */
    int (*unmix)(uint16_t *into, const uint8_t *stored, size_t stored_bytes, const Mixing *mixing);
    /* Any stored bytes: 0 where they are none of `mix`. */
} Kernels;

extern const Kernels kernels_scalar;
#ifdef __x86_64__
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_vbmi2;
#endif

#endif
