/* What every processor of the architecture can do: SSE2 on x86-64, NEON on aarch64, plain C elsewhere. */
#include <stdint.h>
#include <string.h>

#include "hash.h"

#define LEVEL kernels_scalar
#define TARGET
#define FLOATS 4
#ifdef __aarch64__
#define LEVEL_NAME "neon"
#else
#define LEVEL_NAME "scalar"
#endif

static int is_supported(void) { return 1; }

typedef struct {
    uint64_t words[8];
} Line;

static inline Line load_line(const uint8_t *bytes)
{
    Line line;
    memcpy(line.words, bytes, sizeof line.words);
    return line;
}

#define PIN(line) __asm__ volatile("" : "+m"(line) : : "memory")

#ifdef __x86_64__
#include <emmintrin.h>

static inline void stream_quarters(uint8_t *into, Line line)
{
    for (int i = 0; i < 4; i++)
        _mm_stream_si128((__m128i *)into + i, _mm_loadu_si128((const __m128i *)line.words + i));
}

static inline void stream_line(uint8_t *into, Line line) { stream_quarters(into, line); }

static inline void stream_end(void) { _mm_sfence(); }

static inline __m128i load_quarter(const uint8_t *bytes) { return _mm_loadu_si128((const __m128i *)bytes); }

typedef __m128i Vector;

static inline __m128 larger(__m128 a, __m128 b) { return _mm_max_ps(a, b); }

static inline __m128 smaller(__m128 a, __m128 b) { return _mm_min_ps(a, b); }

/* Of signed halves. */
static inline Vector larger_halves(Vector a, Vector b) { return _mm_max_epi16(a, b); }

static inline Vector smaller_halves(Vector a, Vector b) { return _mm_min_epi16(a, b); }

/* The sum of one number and of another one times 1 or -1. */
static inline __m128 add_signed(__m128 a, __m128 b, __m128 signs)
{
    return _mm_add_ps(a, _mm_xor_ps(b, _mm_and_ps(signs, _mm_set1_ps(-0.0f))));
}

/* A sum and a product, rounded once or twice. */
static inline __m128 add_product(__m128 sum, __m128 a, __m128 b) { return _mm_add_ps(sum, _mm_mul_ps(a, b)); }

/* Words times 2^16 nearest to numbers, of two as near the even one. */
static inline Vector rounded_words(Vector bits)
{
    __m128i last = _mm_and_si128(bits, _mm_set1_epi32(0x10000)), added = _mm_or_si128(last, _mm_set1_epi32(0x7FFF));
    __m128i sum = _mm_add_epi32(bits, _mm_madd_epi16(added, _mm_set1_epi16(1)));
    return _mm_and_si128(sum, _mm_set1_epi32((int)0xFFFF0000));
}

static inline void store_words(uint8_t *into, Vector words)
{
    __m128i halves = _mm_packs_epi32(words, words);
    int bytes = _mm_cvtsi128_si32(_mm_packus_epi16(halves, halves));
    memcpy(into, &bytes, sizeof bytes);
}

static inline void store_halves(uint8_t *into, Vector halves)
{
    __m128i low = _mm_and_si128(halves, _mm_set1_epi16(0xFF));
    _mm_storel_epi64((__m128i *)into, _mm_packus_epi16(low, low));
}

static inline unsigned sum_of(const uint8_t *bytes)
{
    __m128i sums = _mm_setzero_si128();
    for (int i = 0; i < 256; i += 16)
        sums = _mm_add_epi64(sums, _mm_sad_epu8(load_quarter(bytes + i), _mm_setzero_si128()));
    return (unsigned)(_mm_cvtsi128_si32(sums) + _mm_cvtsi128_si32(_mm_srli_si128(sums, 8)));
}

static inline uint64_t far_below(const uint8_t *bytes, uint8_t base, uint8_t range)
{
    __m128i bases = _mm_set1_epi8((char)base), ranges = _mm_set1_epi8((char)range);
    uint64_t found = 0;
    for (int i = 0; i < 64; i += 16) {
        __m128i below = _mm_sub_epi8(bases, load_quarter(bytes + i));
        __m128i is_far = _mm_cmpeq_epi8(_mm_max_epu8(below, ranges), below);
        found |= (uint64_t)(uint32_t)_mm_movemask_epi8(is_far) << i;
    }
    return found;
}
#else
static inline void stream_quarters(uint8_t *into, Line line) { memcpy(into, line.words, sizeof line.words); }

static inline void stream_line(uint8_t *into, Line line) { stream_quarters(into, line); }

static inline void stream_end(void) {}

typedef float Values __attribute__((vector_size(16)));
typedef uint32_t Vector __attribute__((vector_size(16)));

static inline Values larger(Values a, Values b)
{
    Vector is_first = (Vector)(a > b);
    return (Values)(((Vector)a & is_first) | ((Vector)b & ~is_first));
}

static inline Values smaller(Values a, Values b)
{
    Vector is_first = (Vector)(a < b);
    return (Values)(((Vector)a & is_first) | ((Vector)b & ~is_first));
}

typedef int16_t Signed __attribute__((vector_size(16)));

/* Of signed halves. */
static inline Vector larger_halves(Vector a, Vector b)
{
    Vector is_first = (Vector)((Signed)a > (Signed)b);
    return (a & is_first) | (b & ~is_first);
}

static inline Vector smaller_halves(Vector a, Vector b)
{
    Vector is_first = (Vector)((Signed)a < (Signed)b);
    return (a & is_first) | (b & ~is_first);
}

/* The sum of one number and of another one times 1 or -1. */
static inline Values add_signed(Values a, Values b, Values signs) { return a + b * signs; }

/* A sum and a product, rounded once or twice. */
static inline Values add_product(Values sum, Values a, Values b) { return sum + a * b; }

/* Words times 2^16 nearest to numbers, of two as near the even one. */
static inline Vector rounded_words(Vector bits) { return (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000; }

static inline void store_words(uint8_t *into, Vector words)
{
    for (int i = 0; i < 4; i++)
        into[i] = (uint8_t)words[i];
}

static inline void store_halves(uint8_t *into, Vector halves)
{
    for (int i = 0; i < 4; i++) {
        into[2 * i] = (uint8_t)halves[i];
        into[2 * i + 1] = (uint8_t)(halves[i] >> 16);
    }
}

static inline unsigned sum_of(const uint8_t *bytes)
{
    unsigned sum = 0;
    for (int i = 0; i < 256; i++)
        sum += bytes[i];
    return sum;
}

/* Eight flags of one byte each, 0 or 1, become the top byte of their product. */
static inline uint64_t far_below(const uint8_t *bytes, uint8_t base, uint8_t range)
{
    uint8_t flags[64];
    uint64_t found = 0, eight;
    for (int i = 0; i < 64; i++)
        flags[i] = (uint8_t)(base - bytes[i]) >= range;
    for (int i = 0; i < 64; i += 8) {
        memcpy(&eight, flags + i, sizeof eight);
        found |= eight * 0x0102040810204080u >> 56 << i;
    }
    return found;
}
#endif

/* Bytes as words, and pairs of them. */
static inline Vector words_of_bytes(const uint8_t *bytes)
{
    uint32_t words[4];
    Vector found;
    for (int i = 0; i < 4; i++)
        words[i] = bytes[i];
    memcpy(&found, words, sizeof found);
    return found;
}

static inline Vector words_of_pairs(const uint8_t *bytes)
{
    uint32_t words[4];
    Vector found;
    for (int i = 0; i < 4; i++)
        words[i] = (uint32_t)(bytes[2 * i] | bytes[2 * i + 1] << 8);
    memcpy(&found, words, sizeof found);
    return found;
}

/* The greatest one of signed halves. */
static inline int16_t largest_half(Vector halves)
{
    int16_t each[8], found = INT16_MIN;
    memcpy(each, &halves, sizeof each);
    for (int i = 0; i < 8; i++)
        found = each[i] > found ? each[i] : found;
    return found;
}

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

static inline Lanes accumulate(Lanes lanes, Line line, const uint8_t *secret)
{
    uint64_t keys[8];
    memcpy(keys, secret, sizeof keys);
    for (int i = 0; i < 8; i++) {
        uint64_t keyed = line.words[i] ^ keys[i];
        lanes.sums[i] += line.words[i ^ 1] + (uint64_t)(uint32_t)keyed * (keyed >> 32);
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
