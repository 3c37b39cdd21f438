/* x86-64 with AVX2. */
#ifdef __x86_64__
#include <immintrin.h>
#include <stdint.h>

#include "hash.h"
#include "processor.h"

#define LEVEL kernels_avx2
#define FLOATS 8
#define LEVEL_NAME "avx2"
#define TARGET __attribute__((target("avx2,bmi,fma,popcnt")))

static int is_supported(void) { return has_avx2(); }

/* Two fields, not an array: an array would live in memory. */
typedef struct {
    __m256i low, high;
} Line;

typedef Line Lanes;

TARGET static inline __m256i load_half(const void *words, int half)
{
    return _mm256_loadu_si256((const __m256i *)words + half);
}

TARGET static inline Line load_line(const uint8_t *bytes) { return (Line){load_half(bytes, 0), load_half(bytes, 1)}; }

#define PIN(line) __asm__ volatile("" : "+x"((line).low), "+x"((line).high) : : "memory")

TARGET static inline void stream_line(uint8_t *into, Line line)
{
    _mm256_stream_si256((__m256i *)into, line.low);
    _mm256_stream_si256((__m256i *)into + 1, line.high);
}

TARGET static inline void stream_quarters(uint8_t *into, Line line)
{
    _mm_stream_si128((__m128i *)into, _mm256_castsi256_si128(line.low));
    _mm_stream_si128((__m128i *)into + 1, _mm256_extracti128_si256(line.low, 1));
    _mm_stream_si128((__m128i *)into + 2, _mm256_castsi256_si128(line.high));
    _mm_stream_si128((__m128i *)into + 3, _mm256_extracti128_si256(line.high, 1));
}

static inline void stream_end(void) { _mm_sfence(); }

TARGET static inline Lanes load_lanes(const uint64_t *sums) { return (Lanes){load_half(sums, 0), load_half(sums, 1)}; }

TARGET static inline void store_lanes(uint64_t *sums, Lanes lanes)
{
    _mm256_storeu_si256((__m256i *)sums, lanes.low);
    _mm256_storeu_si256((__m256i *)sums + 1, lanes.high);
}

TARGET static inline __m256i accumulate_half(__m256i sums, __m256i words, __m256i keys)
{
    __m256i keyed = _mm256_xor_si256(words, keys);
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    return _mm256_add_epi64(product, _mm256_add_epi64(sums, _mm256_shuffle_epi32(words, 0x4E)));
}

TARGET static inline Lanes accumulate(Lanes lanes, Line line, const uint8_t *secret)
{
    return (Lanes){accumulate_half(lanes.low, line.low, load_half(secret, 0)),
                   accumulate_half(lanes.high, line.high, load_half(secret, 1))};
}

TARGET static inline __m256i scramble_half(__m256i sums, __m256i keys)
{
    const __m256i prime = _mm256_set1_epi64x(SCRAMBLE_PRIME);
    __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47)), keys);
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

TARGET static inline Lanes scramble(Lanes lanes, const uint8_t *secret)
{
    return (Lanes){scramble_half(lanes.low, load_half(secret, 0)), scramble_half(lanes.high, load_half(secret, 1))};
}

TARGET static inline unsigned sum_of(const uint8_t *bytes)
{
    __m256i sums = _mm256_setzero_si256();
    for (int i = 0; i < 256; i += 32)
        sums = _mm256_add_epi64(sums, _mm256_sad_epu8(load_half(bytes, i / 32), _mm256_setzero_si256()));
    __m128i both = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return (unsigned)(_mm_cvtsi128_si32(both) + _mm_extract_epi32(both, 2));
}

TARGET static inline uint32_t far_below_half(__m256i bytes, uint8_t base, uint8_t range)
{
    __m256i below = _mm256_sub_epi8(_mm256_set1_epi8((char)base), bytes);
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(below, _mm256_set1_epi8((char)range)), below));
}

TARGET static inline uint64_t far_below(const uint8_t *bytes, uint8_t base, uint8_t range)
{
    return (uint64_t)far_below_half(load_half(bytes, 1), base, range) << 32 |
           far_below_half(load_half(bytes, 0), base, range);
}

typedef __m256i Vector;

TARGET static inline __m256 larger(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }

TARGET static inline __m256 smaller(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }

#define HAS_NIBBLES 1

/* The lower bytes of 16 halves, and the upper ones. */
typedef struct {
    __m128i low, high;
} Nibbled;

TARGET static inline Nibbled nibbled(const uint16_t *halves)
{
    const __m128i low = _mm_set1_epi16(0xFF);
    __m128i first = _mm_loadu_si128((const __m128i *)halves), second = _mm_loadu_si128((const __m128i *)halves + 1);
    return (Nibbled){_mm_packus_epi16(_mm_and_si128(first, low), _mm_and_si128(second, low)),
                     _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8))};
}

/* Halves of a table of 16 for the 32 nibbles of 16 bytes, the low one of each first. */
TARGET static inline void store_of_nibbles(uint8_t *into, Nibbled table, const uint8_t *nibbles)
{
    const __m128i nibble = _mm_set1_epi8(0xF);
    __m128i bytes = _mm_loadu_si128((const __m128i *)nibbles), halves[2][2];
    for (int odd = 0; odd < 2; odd++) {
        __m128i places = _mm_and_si128(odd ? _mm_srli_epi16(bytes, 4) : bytes, nibble);
        __m128i low = _mm_shuffle_epi8(table.low, places), high = _mm_shuffle_epi8(table.high, places);
        halves[odd][0] = _mm_unpacklo_epi8(low, high), halves[odd][1] = _mm_unpackhi_epi8(low, high);
    }
    for (int i = 0; i < 2; i++) {
        _mm_storeu_si128((__m128i *)into + 2 * i, _mm_unpacklo_epi16(halves[0][i], halves[1][i]));
        _mm_storeu_si128((__m128i *)into + 2 * i + 1, _mm_unpackhi_epi16(halves[0][i], halves[1][i]));
    }
}

/* Of signed halves. */
TARGET static inline Vector larger_halves(Vector a, Vector b) { return _mm256_max_epi16(a, b); }

TARGET static inline Vector smaller_halves(Vector a, Vector b) { return _mm256_min_epi16(a, b); }

/* There is an instruction for the least one of eight, without signs. */
TARGET static inline int16_t largest_of_eight(__m128i halves)
{
    int found = _mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(halves, _mm_set1_epi16(INT16_MAX))));
    return (int16_t)(found ^ INT16_MAX);
}

/* The greatest one. */
TARGET static inline int16_t largest_half(Vector halves)
{
    return largest_of_eight(_mm_max_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}

/* The sum of one number and of another one times 1 or -1: that product is exact, so it is rounded once, as ever. */
TARGET static inline __m256 add_signed(__m256 a, __m256 b, __m256 signs) { return _mm256_fmadd_ps(b, signs, a); }

/* A sum and a product, rounded once or twice. */
TARGET static inline __m256 add_product(__m256 sum, __m256 a, __m256 b) { return _mm256_fmadd_ps(a, b, sum); }

/* Words times 2^16 nearest to numbers, of two as near the even one. */
TARGET static inline Vector rounded_words(Vector bits)
{
    __m256i last = _mm256_and_si256(bits, _mm256_set1_epi32(0x10000));
    __m256i added = _mm256_or_si256(last, _mm256_set1_epi32(0x7FFF));
    __m256i sum = _mm256_add_epi32(bits, _mm256_madd_epi16(added, _mm256_set1_epi16(1)));
    return _mm256_and_si256(sum, _mm256_set1_epi32((int)0xFFFF0000));
}

TARGET static inline void store_words(uint8_t *into, Vector words)
{
    __m256i halves = _mm256_packus_epi32(words, words);
    __m128i bytes = _mm_unpacklo_epi32(_mm256_castsi256_si128(_mm256_packus_epi16(halves, halves)),
                                       _mm256_extracti128_si256(_mm256_packus_epi16(halves, halves), 1));
    _mm_storel_epi64((__m128i *)into, bytes);
}

TARGET static inline void store_halves(uint8_t *into, Vector halves)
{
    __m256i low = _mm256_and_si256(halves, _mm256_set1_epi16(0xFF)), bytes = _mm256_packus_epi16(low, low);
    _mm_storeu_si128((__m128i *)into, _mm256_castsi256_si128(_mm256_permute4x64_epi64(bytes, 0xD8)));
}

/* Bytes as words, and pairs of them. */
TARGET static inline Vector words_of_bytes(const uint8_t *bytes)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
}

TARGET static inline Vector words_of_pairs(const uint8_t *bytes)
{
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)bytes));
}

#define HAS_EIGHTS 1

/* Numbers of a table of eight, by the lowest three bits of words. */
TARGET static inline __m256 looked_up_eighth(__m256 table, Vector words) { return _mm256_permutevar8x32_ps(table, words); }

#define HAS_PAIRS 1

/* Of two vectors each: codes of four bits, those of `even` and `odd` in turns. Above them stands what a sum of 2^23 and a
   code has, which is zero in the next bits. */
TARGET static inline void store_nibbles(uint8_t *into, const Vector *even, const Vector *odd)
{
    __m256i words[2];
    for (int i = 0; i < 2; i++) {
        words[i] = _mm256_add_epi32(even[i], _mm256_slli_epi32(odd[i], 4));
        words[i] = _mm256_and_si256(words[i], _mm256_set1_epi32(0xFF));
    }
    __m256i halves = _mm256_packus_epi32(words[0], words[1]), bytes = _mm256_packus_epi16(halves, halves);
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
    _mm_storeu_si128((__m128i *)into, _mm256_castsi256_si128(bytes));
}

/* The lowest bits of words, of `even` and `odd` in turns, as bytes; halves of lanes stand in turns as well. */
TARGET static inline __m256i lowest_bits(const Vector *even, const Vector *odd, int16_t bits)
{
    __m256i halves[2];
    for (int i = 0; i < 2; i++) {
        halves[i] = _mm256_blend_epi16(even[i], _mm256_slli_epi32(odd[i], 16), 0xAA);
        halves[i] = _mm256_and_si256(halves[i], _mm256_set1_epi16(bits));
    }
    return _mm256_packus_epi16(halves[0], halves[1]);
}

TARGET static inline void store_bytes(uint8_t *into, const Vector *even, const Vector *odd)
{
    __m256i bytes = _mm256_permute4x64_epi64(lowest_bits(even, odd, 0xFF), 0xD8);
    _mm256_storeu_si256((__m256i *)into, bytes);
}

/* Seven bits, and the signs of halves, which a half keeps where it becomes the nearest byte. */
TARGET static inline void store_signed(uint8_t *into, const Vector *even, const Vector *odd, const Vector *halves)
{
    __m256i signs = _mm256_and_si256(_mm256_packs_epi16(halves[0], halves[1]), _mm256_set1_epi8((char)0x80));
    __m256i bytes = _mm256_or_si256(lowest_bits(even, odd, 0x7F), signs);
    _mm256_storeu_si256((__m256i *)into, _mm256_permute4x64_epi64(bytes, 0xD8));
}

/* What 32 codes of e4m3 come back as. The table has halves for those below 8, and for 8 to 15, which are normal and come
   again times each power of two. */
TARGET static inline void store_of_e4m3(uint8_t *into, Nibbled table, const uint8_t *codes)
{
    const __m256i lows = _mm256_broadcastsi128_si256(table.low), highs = _mm256_broadcastsi128_si256(table.high);
    const __m256i eight = _mm256_set1_epi8(8), zero = _mm256_setzero_si256();
    __m256i bytes = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)codes), 0xD8);
    __m256i magnitudes = _mm256_and_si256(bytes, _mm256_set1_epi8(0x7F));
    __m256i places = _mm256_and_si256(magnitudes, _mm256_set1_epi8(7));
    places = _mm256_or_si256(places, _mm256_min_epu8(magnitudes, eight));
    __m256i low = _mm256_shuffle_epi8(lows, places), high = _mm256_shuffle_epi8(highs, places);
    high = _mm256_or_si256(high, _mm256_andnot_si256(magnitudes, bytes));
    __m256i powers = _mm256_and_si256(_mm256_srli_epi16(magnitudes, 3), _mm256_set1_epi8(0xF));
    powers = _mm256_subs_epu8(powers, _mm256_set1_epi8(1));
    __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
    first = _mm256_add_epi16(first, _mm256_srli_epi16(_mm256_unpacklo_epi8(zero, powers), 1));
    second = _mm256_add_epi16(second, _mm256_srli_epi16(_mm256_unpackhi_epi8(zero, powers), 1));
    _mm256_storeu_si256((__m256i *)into, first);
    _mm256_storeu_si256((__m256i *)into + 1, second);
}

#include "body.h"
#endif
