/* bf16 to fewer bits (bounds and scales of groups), and back; part of body.h. `forms.py` says what the codes mean,
   `python_forms.py` is the oracle: both sides do the same IEEE operations in the same order, so results are equal to
   the bit.

   Rounding to integers is done by adding a number whose last bit is worth one step: IEEE rounds to nearest even there,
   and the step count stands in the sum's low bits. It needs no instruction that some level lacks. */

#define STRIP 1024             /* Elements at a time: sums, scales and codes of a strip stay in the first cache. */
#define SCALE_MIN 0x1p-100f    /* Of a group that is not all zeros: its inverse and its products stay normal numbers. */
#define TOO_LARGE 0x7B80       /* bf16 of 2^120: from there on a decoded value could overflow. */
#define LANES 32               /* Elements of a widest vector of pairs. */
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
#define MOST(a, b) ((a) > (b) ? (a) : (b))
#define ALWAYS __attribute__((always_inline)) static inline

TARGET ALWAYS float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

TARGET ALWAYS uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

TARGET ALWAYS float widened(uint16_t value) { return float_of((uint32_t)value << 16); }

TARGET ALWAYS uint16_t rounded(float value)
{
    uint32_t bits = bits_of(value);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* Order of bf16 as order of integers. Its own inverse. */
TARGET ALWAYS int16_t ordered(uint16_t value) { return (int16_t)(value ^ ((int16_t)value >> 15 & 0x7FFF)); }

/* Without a branch, so that compilers make vectors of it. */
TARGET ALWAYS uint32_t chosen_of(int is_first, uint32_t first, uint32_t second)
{
    return second ^ ((first ^ second) & -(uint32_t)is_first);
}

#define CHUNK (2 * FLOATS) /* Elements of a vector. */

typedef int16_t Halves __attribute__((vector_size(2 * CHUNK)));
typedef float Floats __attribute__((vector_size(4 * FLOATS)));
typedef uint32_t Words __attribute__((vector_size(4 * FLOATS)));

/* Bounds of groups. */
typedef struct {
    uint16_t largest[STRIP]; /* Bits of the largest magnitude; not of INT4. */
    int16_t least[STRIP];    /* Smallest and greatest value, in order as integers; of INT4 alone. */
    int16_t greatest[STRIP];
} Strip;

/* Scales of groups: of each chunk those at even places first. */
typedef struct {
    float by[STRIP], inverse[STRIP], low[STRIP];
} Split;

TARGET ALWAYS Floats floats_at(const float *values)
{
    Floats found;
    memcpy(&found, values, sizeof found);
    return found;
}

TARGET ALWAYS Floats everywhere(float value) { return value - (Floats){0}; } /* Plus would not leave -0 as it is. */

TARGET ALWAYS void store_at(float *values, Floats stored) { memcpy(values, &stored, sizeof stored); }

/* A chunk: elements at even places in the low halves of words, those at odd places in the high ones. */
TARGET ALWAYS Words chunk_at(const uint16_t *x)
{
    Words found;
    memcpy(&found, x, sizeof found);
    return found;
}

TARGET ALWAYS Floats half_of(Words chunk, int is_odd)
{
    return (Floats)(is_odd ? chunk & 0xFFFF0000 : chunk << 16);
}

TARGET ALWAYS Halves in_order(Halves bits) { return bits ^ ((bits >> 15) & 0x7FFF); } /* As `ordered` does it. */

/* What bounds are found of: values in the order of integers for INT4, else magnitudes. */
TARGET ALWAYS Halves halves_at(const uint16_t *x, int kind)
{
    Halves here;
    memcpy(&here, x, sizeof here);
    return kind == INT4 ? in_order(here) : here & 0x7FFF;
}

/* Bounds of a chunk of columns, into the places from `left` on. */
TARGET ALWAYS void bound_chunk(Strip *strip, size_t left, const uint16_t *x, size_t rows, size_t stride, int kind)
{
    Vector least = (Vector)((Halves){0} + INT16_MAX);
    Vector greatest = (Vector)((Halves){0} + (int16_t)(kind == INT4 ? INT16_MIN : 0));
    for (size_t row = 0; row < rows; row++) {
        Halves here = halves_at(x + row * stride + left, kind);
        greatest = larger_halves(greatest, (Vector)here);
        if (kind == INT4)
            least = smaller_halves(least, (Vector)here);
    }
    memcpy(kind == INT4 ? (void *)(strip->greatest + left) : strip->largest + left, &greatest, sizeof greatest);
    if (kind == INT4)
        memcpy(strip->least + left, &least, sizeof least);
}

/* Bounds of each of `count` columns; rows are `stride` elements apart. */
TARGET ALWAYS void bound_columns(Strip *strip, const uint16_t *x, size_t rows, size_t stride, size_t count, int kind)
{
    size_t left = 0;
    for (; left + CHUNK <= count; left += CHUNK)
        bound_chunk(strip, left, x, rows, stride, kind);
    for (size_t i = left; i < count; i++) {
        strip->largest[i] = 0, strip->least[i] = INT16_MAX, strip->greatest[i] = INT16_MIN;
        for (size_t row = 0; row < rows; row++) {
            uint16_t element = x[row * stride + i], magnitude = element & 0x7FFF;
            strip->largest[i] = MOST(magnitude, strip->largest[i]);
            strip->least[i] = LEAST(ordered(element), strip->least[i]);
            strip->greatest[i] = MOST(ordered(element), strip->greatest[i]);
        }
    }
}

/* Bounds of all elements of a row together. */
TARGET ALWAYS void bound_row(Strip *strip, size_t row, const uint16_t *x, size_t count, int kind)
{
    Halves lows = (Halves){0} + INT16_MAX, highs = (Halves){0} + (int16_t)(kind == INT4 ? INT16_MIN : 0);
    size_t i = 0;
    for (; i + CHUNK <= count; i += CHUNK) {
        Halves here = halves_at(x + i, kind);
        highs = (Halves)larger_halves((Vector)highs, (Vector)here);
        if (kind == INT4)
            lows = (Halves)smaller_halves((Vector)lows, (Vector)here);
    }
    int16_t greatest = largest_half((Vector)highs), least = kind == INT4 ? (int16_t)~largest_half((Vector)~lows) : 0;
    for (; i < count; i++) {
        int16_t here = kind == INT4 ? ordered(x[i]) : (int16_t)(x[i] & 0x7FFF);
        greatest = MOST(here, greatest);
        least = LEAST(here, least);
    }
    if (kind == INT4)
        strip->least[row] = least, strip->greatest[row] = greatest;
    else
        strip->largest[row] = (uint16_t)greatest;
}

/* Scales of half a chunk of groups, from what a step of the codes is worth at least; returns their bits. */
TARGET ALWAYS Words scale_half(Split *split, size_t i, Floats amount)
{
    Words is_some = (Words)(amount > 0.0f);
    Words bits = (((Words)larger(amount, (Floats){0} + SCALE_MIN) & is_some) + 0xFFFF) & 0xFFFF0000;
    store_at(split->by + i, (Floats)bits);
    store_at(split->inverse + i, (Floats)((Words)(1.0f / (Floats)bits) & is_some));
    return bits;
}

/* The first ones of a vector of words; of a length that is known it is one store. */
TARGET ALWAYS void store_first(uint16_t *into, Words words, size_t count)
{
    if (count >= CHUNK)
        memcpy(into, &words, 2 * CHUNK);
    else if (count == FLOATS)
        memcpy(into, &words, 2 * FLOATS);
    else
        memcpy(into, &words, 2 * count);
}

/* Scales from bounds; returns the bits of the largest magnitude. */
TARGET ALWAYS uint16_t scale(Split *split, Strip *strip, uint16_t *scales, uint16_t *lows, size_t count, int kind)
{
    Vector most = {0};
    for (size_t i = count; i % CHUNK != 0; i++)
        strip->largest[i] = 0, strip->least[i] = 0, strip->greatest[i] = 0;
    for (size_t i = 0; i < count; i += CHUNK) {
        Words low, high, bits[2];
        if (kind == INT4) {
            memcpy(&low, strip->least + i, sizeof low);
            memcpy(&high, strip->greatest + i, sizeof high);
            low = (Words)in_order((Halves)low), high = (Words)in_order((Halves)high);
            store_first(lows + i, low, count - i);
            most = larger_halves(most, larger_halves((Vector)(low & 0x7FFF7FFF), (Vector)(high & 0x7FFF7FFF)));
        } else {
            memcpy(&high, strip->largest + i, sizeof high);
            most = larger_halves(most, (Vector)high);
        }
        for (int odd = 0; odd < 2; odd++) {
            size_t at = i + (size_t)(FLOATS * odd);
            if (kind == INT4) {
                store_at(split->low + at, half_of(low, odd));
                bits[odd] = scale_half(split, at, (half_of(high, odd) - half_of(low, odd)) / 15.0f);
            } else {
                bits[odd] = scale_half(split, at, half_of(high, odd) / (kind == INT8 ? 127.0f : 448.0f));
            }
        }
        store_first(scales + i, bits[0] >> 16 | bits[1], count - i);
    }
    return (uint16_t)largest_half(most);
}

TARGET ALWAYS void decode(uint16_t *restrict x, const uint8_t *restrict codes, const float *scales, const float *lows,
                          size_t count, int kind, int step)
{
    for (size_t i = 0; i < count; i++) {
        float by = scales[step * i];
        if (kind == FP8) {
            uint32_t magnitude = codes[i] & 0x7F;
            uint32_t normal = (magnitude << 20) + (120u << 23), subnormal = bits_of((float)(int32_t)magnitude * 0x1p-9f);
            float value = float_of(chosen_of(magnitude < 8, subnormal, normal));
            x[i] = (uint16_t)(rounded(value * by) | (codes[i] & 0x80) << 8);
        } else if (kind == INT8) {
            x[i] = rounded((float)(int8_t)codes[i] * by);
        } else {
            x[i] = rounded((float)(int32_t)codes[i] * by + lows[step * i]);
        }
    }
}

TARGET ALWAYS void decode_strip(uint16_t *x, const uint8_t *codes, const float *scales, const float *lows, size_t count,
                                int kind, int step)
{
    uint8_t single[STRIP];
    if (kind != INT4) {
        decode(x, codes, scales, lows, count, kind, step);
        return;
    }
    for (size_t i = 0; i < count / 2; i++) {
        uint16_t pair = (uint16_t)((codes[i] & 0xF) | (codes[i] & 0xF0) << 4);
        memcpy(single + 2 * i, &pair, sizeof pair);
    }
    decode(x, single, scales, lows, count, kind, step);
}

#ifdef HAS_NIBBLES
/* INT4 of one scale: there are 16 numbers that they come back as. Returns how many were decoded. */
TARGET ALWAYS size_t decode_nibbles(uint16_t *x, const uint8_t *codes, float by, float low, size_t count)
{
    uint16_t table[16];
    for (int code = 0; code < 16; code++)
        table[code] = rounded((float)code * by + low);
    Nibbled looked = nibbled(table);
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store_of_nibbles((uint8_t *)(x + i), looked, codes + i / 2);
    return i;
}
#endif

#ifdef HAS_PAIRS
/* e4m3 of one scale: there are 16 numbers that codes come back as, times powers of two. Returns how many were decoded:
   none where a scale is no kernel's, whose products might be no normal numbers. */
TARGET ALWAYS size_t decode_e4m3(uint16_t *x, const uint8_t *codes, float by, size_t count)
{
    uint16_t table[16];
    if (!(by >= SCALE_MIN && by < 0x1p100f))
        return 0;
    for (int code = 0; code < 16; code++)
        table[code] = rounded((float)code * 0x1p-9f * by);
    Nibbled looked = nibbled(table);
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store_of_e4m3((uint8_t *)(x + i), looked, codes + i);
    return i;
}
#endif

/* Groups below each other in a column. Groups may be of any size, so nothing is added to it. */
ALWAYS size_t bands_of(const Grid *grid) { return grid->rows / grid->group + (grid->rows % grid->group != 0); }

#define CODES(at) ((at) / (kind == INT4 ? 2 : 1)) /* Bytes of codes before element `at`. */

/* One scale for `group` elements that lie beside each other. */
TARGET ALWAYS void unpack_runs(const Grid *grid, uint16_t *x, const uint8_t *codes, const uint16_t *scales, int kind)
{
    size_t groups = grid->rows * grid->columns / grid->group;
    for (size_t g = 0, at = 0; g < groups; g++, at += grid->group) {
        float by = widened(scales[g]), low = kind == INT4 ? widened(scales[groups + g]) : 0.0f;
        size_t i = 0;
#ifdef HAS_NIBBLES
        if (kind == INT4)
            i = decode_nibbles(x + at, codes + CODES(at), by, low, grid->group);
#endif
#ifdef HAS_PAIRS
        if (kind == FP8)
            i = decode_e4m3(x + at, codes + at, by, grid->group);
#endif
        for (; i < grid->group; i += STRIP)
            decode_strip(x + at + i, codes + CODES(at + i), &by, &low, LEAST(STRIP, grid->group - i), kind, 0);
    }
}

/* One scale for up to `group` elements that lie below each other. */
TARGET ALWAYS void unpack_columns(const Grid *grid, uint16_t *x, const uint8_t *codes, const uint16_t *scales, int kind)
{
    float by[STRIP], low[STRIP];
    size_t columns = grid->columns, count = bands_of(grid) * columns;
    for (size_t top = 0; top < grid->rows; top += grid->group, scales += columns) {
        size_t bottom = LEAST(top + grid->group, grid->rows);
        for (size_t left = 0; left < columns; left += STRIP) {
            size_t wide = LEAST(STRIP, columns - left);
            for (size_t i = 0; i < wide; i++) {
                by[i] = widened(scales[left + i]);
                low[i] = kind == INT4 ? widened(scales[count + left + i]) : 0.0f;
            }
            for (size_t at = top * columns + left; at < bottom * columns; at += columns)
                decode_strip(x + at, codes + CODES(at), by, low, wide, kind, 1);
        }
    }
}

TARGET static void unpack(const Grid *grid, uint16_t *x, const uint8_t *codes, const uint16_t *scales)
{
    switch (grid->kind * 2 + grid->is_by_column) {
    case FP8 * 2: unpack_runs(grid, x, codes, scales, FP8); break;
    case FP8 * 2 + 1: unpack_columns(grid, x, codes, scales, FP8); break;
    case INT8 * 2: unpack_runs(grid, x, codes, scales, INT8); break;
    case INT8 * 2 + 1: unpack_columns(grid, x, codes, scales, INT8); break;
    case INT4 * 2: unpack_runs(grid, x, codes, scales, INT4); break;
    case INT4 * 2 + 1: unpack_columns(grid, x, codes, scales, INT4); break;
    }
}
