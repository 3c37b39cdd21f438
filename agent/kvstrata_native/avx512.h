/* Registers of 64 bytes, for both levels that have them; a level defines TARGET, and HAS_BYTES where it can permute and
   compress bytes. */
#include <immintrin.h>
#include <stdint.h>

#include "hash.h"

#define FLOATS 16

typedef __m512i Line;

TARGET static inline Line load_line(const uint8_t *bytes) { return _mm512_loadu_si512(bytes); }

#define PIN(line) __asm__ volatile("" : "+v"(line) : : "memory")

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

/* Numbers of a table of 16, by the low bits of words. */
TARGET static inline __m512 looked_up_once(__m512 table, Vector words) { return _mm512_permutexvar_ps(words, table); }

/* The same of 32. */
TARGET static inline __m512 looked_up(__m512 first, __m512 second, Vector words)
{
    return _mm512_permutex2var_ps(first, words, second);
}

#define HAS_EIGHTS 1

/* Numbers of a table of eight, which it has twice, by the lowest three bits of words. */
TARGET static inline __m512 looked_up_eighth(__m512 table, Vector words)
{
    return _mm512_permutexvar_ps(words, table);
}

#define HAS_NIBBLES 1

typedef __m512i Nibbled;

TARGET static inline Nibbled nibbled(const uint16_t *halves)
{
    return _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)halves));
}

/* Halves of a table of 16 for the 32 nibbles of 16 bytes, the low one of each first. */
TARGET static inline void store_of_nibbles(uint8_t *into, Nibbled table, const uint8_t *nibbles)
{
    __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)nibbles));
    __m256i places = _mm256_and_si256(_mm256_or_si256(bytes, _mm256_slli_epi16(bytes, 4)), _mm256_set1_epi16(0x0F0F));
    _mm512_storeu_si512(into, _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(places), table));
}

/* Of signed halves. */
TARGET static inline Vector larger_halves(Vector a, Vector b) { return _mm512_max_epi16(a, b); }

TARGET static inline Vector smaller_halves(Vector a, Vector b) { return _mm512_min_epi16(a, b); }

/* There is an instruction for the least one of eight, without signs. */
TARGET static inline int16_t largest_of_eight(__m128i halves)
{
    int found = _mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(halves, _mm_set1_epi16(INT16_MAX))));
    return (int16_t)(found ^ INT16_MAX);
}

/* The greatest one. */
TARGET static inline int16_t largest_half(Vector halves)
{
    __m256i four = _mm256_max_epi16(_mm512_castsi512_si256(halves), _mm512_extracti64x4_epi64(halves, 1));
    return largest_of_eight(_mm_max_epi16(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1)));
}

/* The sum of one number and of another one times 1 or -1: that product is exact, so it is rounded once, as ever. */
TARGET static inline __m512 add_signed(__m512 a, __m512 b, __m512 signs) { return _mm512_fmadd_ps(b, signs, a); }

/* A sum and a product, rounded once or twice. */
TARGET static inline __m512 add_product(__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }

/* Words times 2^16 nearest to numbers, of two as near the even one. */
TARGET static inline Vector rounded_words(Vector bits)
{
    __m512i added = _mm512_ternarylogic_epi32(bits, _mm512_set1_epi32(0x10000), _mm512_set1_epi32(0x7FFF), 0xEA);
#ifdef HAS_BYTES
    __m512i sum = _mm512_dpwssd_epi32(bits, added, _mm512_set1_epi16(1));
#else
    __m512i sum = _mm512_add_epi32(bits, _mm512_madd_epi16(added, _mm512_set1_epi16(1)));
#endif
    return _mm512_and_si512(sum, _mm512_set1_epi32((int)0xFFFF0000));
}

TARGET static inline void store_words(uint8_t *into, Vector words)
{
    _mm_storeu_si128((__m128i *)into, _mm512_cvtepi32_epi8(words));
}

TARGET static inline void store_halves(uint8_t *into, Vector halves)
{
    _mm256_storeu_si256((__m256i *)into, _mm512_cvtepi16_epi8(halves));
}

/* Bytes as words, and pairs of them. */
TARGET static inline Vector words_of_bytes(const uint8_t *bytes)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
}

TARGET static inline Vector words_of_pairs(const uint8_t *bytes)
{
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)bytes));
}

#ifdef HAS_BYTES
TARGET static inline __m512i numbers_from(int first)
{
    static const uint8_t numbers[64] = {
        0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
        22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
        44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
    return _mm512_add_epi8(_mm512_loadu_si512(numbers), _mm512_set1_epi8((char)first));
}

/* 64 words rotated left by one bit: their top bytes, and the others. */
TARGET static inline void split_words(uint8_t *top, uint8_t *rest, const uint8_t *words)
{
    __m512i low = _mm512_loadu_si512(words), high = _mm512_loadu_si512(words + 64), even = numbers_from(0);
    even = _mm512_add_epi8(even, even);
    low = _mm512_shldi_epi16(low, low, 1), high = _mm512_shldi_epi16(high, high, 1);
    _mm512_storeu_si512(rest, _mm512_permutex2var_epi8(low, even, high));
    _mm512_storeu_si512(top, _mm512_permutex2var_epi8(low, _mm512_or_si512(even, _mm512_set1_epi8(1)), high));
}

/* The lowest bytes of words, of `even` and `odd` in turns. */
TARGET static inline __m256i lowest_bytes(Vector even, Vector odd)
{
    const __m128i low = _mm_setr_epi8(0, 64, 4, 68, 8, 72, 12, 76, 16, 80, 20, 84, 24, 88, 28, 92);
    const __m256i places = _mm256_set_m128i(_mm_add_epi8(low, _mm_set1_epi8(32)), low);
    return _mm512_castsi512_si256(_mm512_permutex2var_epi8(even, _mm512_castsi256_si512(places), odd));
}

TARGET static inline void store_lowest_bytes(uint8_t *into, Vector even, Vector odd)
{
    _mm256_storeu_si256((__m256i *)into, lowest_bytes(even, odd));
}

/* The same, with the signs of halves as their top bits. */
TARGET static inline void store_signed_bytes(uint8_t *into, Vector even, Vector odd, Vector halves)
{
    __m512i tops = _mm512_permutexvar_epi8(_mm512_add_epi8(numbers_from(0), numbers_from(1)), halves);
    __m256i signs = _mm512_castsi512_si256(tops), codes = lowest_bytes(even, odd);
    _mm256_storeu_si256((__m256i *)into, _mm256_ternarylogic_epi64(codes, signs, _mm256_set1_epi8((char)0x80), 0xD8));
}

/* The numbers that are marked of 64 ones from `first` on; what is filled behind them means nothing. */
TARGET static inline void store_marked_numbers(uint8_t *into, uint64_t marks, int first)
{
    _mm512_storeu_si512(into, _mm512_maskz_compress_epi8(marks, numbers_from(first)));
}

/* The same of 64 bytes. */
TARGET static inline void store_marked(uint8_t *into, uint64_t marks, const uint8_t *bytes)
{
    _mm512_storeu_si512(into, _mm512_maskz_compress_epi8(marks, _mm512_loadu_si512(bytes)));
}
#endif
