/* x86-64 with AVX-512, as far as server processors have had it from the first. */
#ifdef __x86_64__
#include <immintrin.h>
#include <stdint.h>

#include "hash.h"

#define LEVEL kernels_avx512
#define FLOATS 16
#define LEVEL_NAME "avx512"
#ifdef __clang__
#define WIDE "" /* It knows the preference as an option alone, and refuses the whole attribute with it. */
#else
#define WIDE ",prefer-vector-width=512"
#endif
#define TARGET __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,bmi,popcnt" WIDE)))

static int is_supported(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
}

typedef __m512i Line;

TARGET static inline Line load_line(const uint8_t *bytes) { return _mm512_loadu_si512(bytes); }

TARGET static inline void stream_line(uint8_t *into, Line line) { _mm512_stream_si512((__m512i *)into, line); }

TARGET static inline void stream_quarters(uint8_t *into, Line line)
{
    _mm_stream_si128((__m128i *)into, _mm512_castsi512_si128(line));
    _mm_stream_si128((__m128i *)into + 1, _mm512_extracti32x4_epi32(line, 1));
    _mm_stream_si128((__m128i *)into + 2, _mm512_extracti32x4_epi32(line, 2));
    _mm_stream_si128((__m128i *)into + 3, _mm512_extracti32x4_epi32(line, 3));
}

static inline void stream_end(void) { _mm_sfence(); }

typedef __m512i Lanes;

TARGET static inline Lanes load_lanes(const uint64_t *sums) { return _mm512_loadu_si512(sums); }

TARGET static inline void store_lanes(uint64_t *sums, Lanes lanes) { _mm512_storeu_si512(sums, lanes); }

TARGET static inline Lanes accumulate(Lanes lanes, Line words, const uint8_t *secret)
{
    __m512i keyed = _mm512_xor_si512(words, _mm512_loadu_si512(secret));
    __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    __m512i swapped = _mm512_shuffle_epi32(words, (_MM_PERM_ENUM)0x4E);
    return _mm512_add_epi64(product, _mm512_add_epi64(lanes, swapped));
}

TARGET static inline Lanes scramble(Lanes lanes, const uint8_t *secret)
{
    const __m512i prime = _mm512_set1_epi64(SCRAMBLE_PRIME);
    __m512i mixed = _mm512_xor_si512(lanes, _mm512_srli_epi64(lanes, 47));
    mixed = _mm512_xor_si512(mixed, _mm512_loadu_si512(secret));
    __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
    return _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
}

TARGET static inline unsigned sum_of(const uint8_t *bytes)
{
    __m512i sums = _mm512_setzero_si512();
    for (int i = 0; i < 256; i += 64)
        sums = _mm512_add_epi64(sums, _mm512_sad_epu8(_mm512_loadu_si512(bytes + i), _mm512_setzero_si512()));
    return (unsigned)_mm512_reduce_add_epi64(sums);
}

TARGET static inline uint64_t far_below(const uint8_t *bytes, uint8_t base, uint8_t range)
{
    __m512i below = _mm512_sub_epi8(_mm512_set1_epi8((char)base), _mm512_loadu_si512(bytes));
    return _mm512_cmpge_epu8_mask(below, _mm512_set1_epi8((char)range));
}

typedef __m512i Vector;

TARGET static inline __m512 larger(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }

TARGET static inline __m512 smaller(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }

#define HAS_TABLES 1

/* Numbers of a table of 32, by the low bits of words. */
TARGET static inline __m512 looked_up(__m512 first, __m512 second, Vector words)
{
    return _mm512_permutex2var_ps(first, words, second);
}

/* Of signed halves. */
TARGET static inline Vector larger_halves(Vector a, Vector b) { return _mm512_max_epi16(a, b); }

TARGET static inline Vector smaller_halves(Vector a, Vector b) { return _mm512_min_epi16(a, b); }

/* The two halves of each word together. */
TARGET static inline Vector sum_halves(Vector words) { return _mm512_madd_epi16(words, _mm512_set1_epi16(1)); }

TARGET static inline void store_words(uint8_t *into, Vector words)
{
    _mm_storeu_si128((__m128i *)into, _mm512_cvtepi32_epi8(words));
}

TARGET static inline void store_halves(uint8_t *into, Vector halves)
{
    _mm256_storeu_si256((__m256i *)into, _mm512_cvtepi16_epi8(halves));
}

#include "body.h"
#endif
