/* What every processor of the architecture can do: SSE2 on x86-64, NEON on aarch64, plain C elsewhere. */
#include <stdint.h>

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
#include <string.h>

static inline void stream_line(uint8_t *into, const uint8_t *source) { memcpy(into, source, 64); }

static inline void stream_end(void) {}
#endif

#include "body.h"
