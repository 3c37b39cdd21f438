/* x86-64 with AVX2. */
#ifdef __x86_64__
#include <immintrin.h>
#include <stdint.h>

#define LEVEL kernels_avx2
#define LEVEL_NAME "avx2"
#define TARGET __attribute__((target("avx2")))

static int is_supported(void) { return __builtin_cpu_supports("avx2"); }

TARGET static inline void stream_line(uint8_t *into, const uint8_t *source)
{
    for (int i = 0; i < 64; i += 32)
        _mm256_stream_si256((__m256i *)(into + i), _mm256_loadu_si256((const __m256i *)(source + i)));
}

static inline void stream_end(void) { _mm_sfence(); }

#include "body.h"
#endif
