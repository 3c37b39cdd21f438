/* What every processor of the architecture can do: SSE2 on x86-64, NEON on aarch64, plain C elsewhere. */
#include <stdint.h>
#include <string.h>

#include "hash.h"

#define LEVEL kernels_scalar
#define TARGET
#ifdef __aarch64__
#define LEVEL_NAME "neon"
#else
#define LEVEL_NAME "scalar"
#endif

static int is_supported(void) { return 1; }

#ifdef __x86_64__
#include <emmintrin.h>

static inline void stream_line(uint8_t *into, const uint8_t *source)
{
    for (int i = 0; i < 64; i += 16)
        _mm_stream_si128((__m128i *)(into + i), _mm_loadu_si128((const __m128i *)(source + i)));
}

static inline void stream_end(void) { _mm_sfence(); }
#else
static inline void stream_line(uint8_t *into, const uint8_t *source) { memcpy(into, source, 64); }

static inline void stream_end(void) {}
#endif

typedef struct {
    uint64_t sums[8];
} Lanes;

static inline Lanes load_lanes(const uint64_t *sums)
{
    Lanes lanes;
    memcpy(lanes.sums, sums, sizeof lanes.sums);
    return lanes;
}

static inline void store_lanes(uint64_t *sums, Lanes lanes) { memcpy(sums, lanes.sums, sizeof lanes.sums); }

static inline Lanes accumulate(Lanes lanes, const uint8_t *input, const uint8_t *secret)
{
    uint64_t words[8], keys[8];
    memcpy(words, input, sizeof words);
    memcpy(keys, secret, sizeof keys);
    for (int i = 0; i < 8; i++) {
        uint64_t keyed = words[i] ^ keys[i];
        lanes.sums[i] += words[i ^ 1] + (uint64_t)(uint32_t)keyed * (keyed >> 32);
    }
    return lanes;
}

static inline Lanes scramble(Lanes lanes, const uint8_t *secret)
{
    uint64_t keys[8];
    memcpy(keys, secret, sizeof keys);
    for (int i = 0; i < 8; i++)
        lanes.sums[i] = (lanes.sums[i] ^ (lanes.sums[i] >> 47) ^ keys[i]) * SCRAMBLE_PRIME;
    return lanes;
}

#include "body.h"
