/* x86-64 with AVX-512, as far as server processors have had it from the first. */
#ifdef __x86_64__
#include <immintrin.h>
#include <stdint.h>

#define LEVEL kernels_avx512
#define LEVEL_NAME "avx512"
#define TARGET __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))

static int is_supported(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

TARGET static inline void stream_line(uint8_t *into, const uint8_t *source)
{
    _mm512_stream_si512((__m512i *)into, _mm512_loadu_si512(source));
}

static inline void stream_end(void) { _mm_sfence(); }

#include "body.h"
#endif
