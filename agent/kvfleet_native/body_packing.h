/* bf16 to fewer bits and back; part of body.h. `packing.py` says what the codes mean, `python_packing.py` is the oracle:
   both sides do the same IEEE operations in the same order, so results are equal to the bit.

   Rounding to integers is done by adding a number whose last bit is worth one step: IEEE rounds to nearest even there,
   and the step count stands in the sum's low bits. It needs no instruction that some level lacks. */

#define STRIP 1024             /* Elements at a time: sums, scales and codes of a strip stay in the first cache. */
#define SCALE_MIN 0x1p-100f    /* Of a group that is not all zeros: its inverse and its products stay normal numbers. */
#define TOO_LARGE 0x7B80       /* bf16 of 2^120: from there on a decoded value could overflow. */
#define LANES 16               /* Elements of the widest vector. */
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

/* bf16 that is not below a positive `value`. */
TARGET ALWAYS uint16_t rounded_up(float value) { return (uint16_t)((bits_of(value) + 0xFFFF) >> 16); }

/* Order of bf16 as order of integers. Its own inverse. */
TARGET ALWAYS int16_t ordered(uint16_t value) { return (int16_t)(value ^ (value & 0x8000 ? 0x7FFF : 0)); }

/* Without a branch, so that compilers make vectors of it. */
TARGET ALWAYS uint32_t chosen_of(int is_first, uint32_t first, uint32_t second)
{
    return second ^ ((first ^ second) & -(uint32_t)is_first);
}

typedef struct {
    uint16_t largest[STRIP]; /* Bits of the largest magnitude; not of INT4. */
    int16_t least[STRIP];    /* Smallest and greatest value, in order as integers; of INT4 alone. */
    int16_t greatest[STRIP];
    float by[STRIP + LANES], inverse[STRIP + LANES], low[STRIP + LANES]; /* Whole vectors may be read. */
} Strip;

TARGET ALWAYS void unbound(Strip *strip, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        strip->largest[i] = 0;
        strip->least[i] = INT16_MAX;
        strip->greatest[i] = INT16_MIN;
    }
}

/* Widen the bounds by `count` elements: of each on its own, or of all of them together in [row]. */
TARGET ALWAYS void bound_each(Strip *strip, const uint16_t *x, size_t count, int kind)
{
    for (size_t i = 0; i < count; i++) {
        uint16_t magnitude = x[i] & 0x7FFF;
        int16_t order = ordered(x[i]);
        if (kind == INT4) {
            strip->least[i] = LEAST(order, strip->least[i]);
            strip->greatest[i] = MOST(order, strip->greatest[i]);
        } else {
            strip->largest[i] = MOST(magnitude, strip->largest[i]);
        }
    }
}

TARGET ALWAYS void bound_row(Strip *strip, size_t row, const uint16_t *x, size_t count, int kind)
{
    uint16_t largest = 0;
    int16_t least = INT16_MAX, greatest = INT16_MIN;
    for (size_t i = 0; i < count; i++) {
        uint16_t magnitude = x[i] & 0x7FFF;
        int16_t order = ordered(x[i]);
        largest = MOST(magnitude, largest);
        least = LEAST(order, least);
        greatest = MOST(order, greatest);
    }
    if (kind == INT4) {
        strip->least[row] = least;
        strip->greatest[row] = greatest;
    } else {
        strip->largest[row] = largest;
    }
}

/* Scales from bounds; returns the bits of the largest magnitude. */
TARGET ALWAYS uint16_t scale(Strip *strip, uint16_t *scales, uint16_t *lows, size_t count, int kind)
{
    uint16_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        float amount;
        if (kind == INT4) {
            uint16_t low = (uint16_t)ordered((uint16_t)strip->least[i]);
            uint16_t high = (uint16_t)ordered((uint16_t)strip->greatest[i]);
            amount = (widened(high) - widened(low)) / 15.0f;
            lows[i] = low;
            strip->low[i] = widened(low);
            largest = MOST(MOST(low & 0x7FFF, high & 0x7FFF), largest);
        } else {
            amount = widened(strip->largest[i]) / (kind == INT8 ? 127.0f : 448.0f);
            largest = MOST(strip->largest[i], largest);
        }
        amount = amount > 0.0f && amount < SCALE_MIN ? SCALE_MIN : amount;
        scales[i] = rounded_up(amount);
        strip->by[i] = widened(scales[i]);
        strip->inverse[i] = amount > 0.0f ? 1.0f / strip->by[i] : 0.0f;
    }
    return largest;
}

/* A number is added whose last bit is worth one step of e4m3 there: subnormals have the steps of the least normals. */
TARGET ALWAYS uint8_t fp8_of(uint16_t x, float inverse)
{
    const uint32_t most = 0x43E00000, normal_from = 0x3C800000; /* Bits of 448 and of 2^-6. */
    uint32_t bits = bits_of(widened(x & 0x7FFF) * inverse);
    bits = LEAST(bits, most);
    uint32_t power = bits & 0x7F800000;
    power = MOST(power, normal_from);
    uint32_t steps = bits_of(float_of(bits) + float_of(power + (20u << 23))) & 0x1F;
    return (uint8_t)(((power - normal_from) >> 20) + steps) | (uint8_t)(x >> 8 & 0x80);
}

/* Codes of `count` elements; scales by element (step 1), or one for all (step 0). INT4 leaves one code in each byte. */
TARGET ALWAYS void encode(const Strip *strip, uint8_t *restrict codes, const uint16_t *restrict x, size_t count,
                          int kind, int step)
{
    for (size_t i = 0; i < count; i++) {
        float inverse = strip->inverse[step * i];
        if (kind == FP8)
            codes[i] = fp8_of(x[i], inverse);
        else if (kind == INT8)
            codes[i] = (uint8_t)bits_of(widened(x[i]) * inverse + 0x1.8p23f);
        else
            codes[i] = (uint8_t)(bits_of((widened(x[i]) - strip->low[step * i]) * inverse + 0x1p23f) & 0xF);
    }
}

/* Two codes of INT4 in a byte. */
TARGET ALWAYS void pair_up(uint8_t *restrict codes, const uint8_t *restrict single, size_t count)
{
    for (size_t i = 0; i < count / 2; i++) {
        uint16_t pair;
        memcpy(&pair, single + 2 * i, sizeof pair);
        codes[i] = (uint8_t)(pair | pair >> 4);
    }
}

TARGET ALWAYS void encode_strip(const Strip *strip, uint8_t *codes, const uint16_t *x, size_t count, int kind, int step)
{
    uint8_t single[STRIP];
    if (kind != INT4) {
        encode(strip, codes, x, count, kind, step);
        return;
    }
    encode(strip, single, x, count, kind, step);
    pair_up(codes, single, count);
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

#define CODES(at) ((at) / (kind == INT4 ? 2 : 1)) /* Bytes of codes before element `at`. */

/* One scale for `group` elements that lie beside each other. */
TARGET ALWAYS uint16_t pack_runs(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x, int kind)
{
    Strip strip;
    size_t groups = grid->rows * grid->columns / grid->group;
    uint16_t largest = 0;
    for (size_t g = 0, at = 0; g < groups; g++, at += grid->group) {
        bound_row(&strip, 0, x + at, grid->group, kind);
        uint16_t here = scale(&strip, scales + g, scales + groups + g, 1, kind);
        largest = MOST(here, largest);
        for (size_t i = 0; i < grid->group; i += STRIP)
            encode_strip(&strip, codes + CODES(at + i), x + at + i, LEAST(STRIP, grid->group - i), kind, 0);
    }
    return largest;
}

TARGET ALWAYS void unpack_runs(const Grid *grid, uint16_t *x, const uint8_t *codes, const uint16_t *scales, int kind)
{
    size_t groups = grid->rows * grid->columns / grid->group;
    for (size_t g = 0, at = 0; g < groups; g++, at += grid->group) {
        float by = widened(scales[g]), low = kind == INT4 ? widened(scales[groups + g]) : 0.0f;
        for (size_t i = 0; i < grid->group; i += STRIP)
            decode_strip(x + at + i, codes + CODES(at + i), &by, &low, LEAST(STRIP, grid->group - i), kind, 0);
    }
}

/* One scale for up to `group` elements that lie below each other. */
TARGET ALWAYS uint16_t pack_columns(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x, int kind)
{
    Strip strip;
    size_t columns = grid->columns, count = (grid->rows + grid->group - 1) / grid->group * columns;
    uint16_t largest = 0;
    for (size_t top = 0; top < grid->rows; top += grid->group, scales += columns) {
        size_t bottom = LEAST(top + grid->group, grid->rows);
        for (size_t left = 0; left < columns; left += STRIP) {
            size_t wide = LEAST(STRIP, columns - left);
            unbound(&strip, wide);
            for (size_t row = top; row < bottom; row++)
                bound_each(&strip, x + row * columns + left, wide, kind);
            uint16_t here = scale(&strip, scales + left, scales + count + left, wide, kind);
            largest = MOST(here, largest);
            for (size_t at = top * columns + left; at < bottom * columns; at += columns)
                encode_strip(&strip, codes + CODES(at), x + at, wide, kind, 1);
        }
    }
    return largest;
}

TARGET ALWAYS void unpack_columns(const Grid *grid, uint16_t *x, const uint8_t *codes, const uint16_t *scales, int kind)
{
    float by[STRIP], low[STRIP];
    size_t columns = grid->columns, count = (grid->rows + grid->group - 1) / grid->group * columns;
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

TARGET static int pack(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x)
{
    uint16_t largest = 0;
    switch (grid->kind * 2 + grid->is_by_column) {
    case FP8 * 2: largest = pack_runs(grid, codes, scales, x, FP8); break;
    case FP8 * 2 + 1: largest = pack_columns(grid, codes, scales, x, FP8); break;
    case INT8 * 2: largest = pack_runs(grid, codes, scales, x, INT8); break;
    case INT8 * 2 + 1: largest = pack_columns(grid, codes, scales, x, INT8); break;
    case INT4 * 2: largest = pack_runs(grid, codes, scales, x, INT4); break;
    case INT4 * 2 + 1: largest = pack_columns(grid, codes, scales, x, INT4); break;
    }
    return largest < TOO_LARGE;
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
