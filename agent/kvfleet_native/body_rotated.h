/* Rows whose channels are mixed before they are packed; part of body.h. `mixing.py` says what the codes mean,
   `python_rotated.py` is the oracle: equal to the bit.

   Runs of a row are multiplied by a Hadamard matrix, which is orthogonal but for a power of two: what a few large channels
   have spreads over all of the run, so one scale for the row costs little. Only additions and products of equal
   operands in equal order: results are the same at every level. */

#define ROTATED_BELOW 0x6D80 /* bf16 of 2^92: sums over the longest run, there and back, stay numbers. */
#define SHARE_BELOW 0x7380   /* bf16 of 2^104: what scales and least values of such rows are below. */
#define RUN_LEAST 16
#define RUN_MOST 1024

/* Lanes whose numbers differ in the bit `h`, in each other's places. */
#ifdef __clang__
TARGET ALWAYS Floats turned(Floats values, int h)
{
    Floats found = values;
    for (int lane = 0; lane < FLOATS; lane++)
        found[lane] = values[lane ^ h];
    return found;
}
#define TURNED(values, h) turned(values, h)
#else
#define TURNED(values, h) __builtin_shuffle(values, (Words)NUMBERS ^ (h))
#endif

/* Their sums and differences. */
#define BUTTERFLY(values, h) \
    (TURNED(values, h) + (Floats)((Words)(values) ^ ((Words)(((Words)NUMBERS & (h)) != 0) & 0x80000000)))

/* Multiply a run by the Hadamard matrix. `count` is a power of two, and a whole number of vectors. */
TARGET ALWAYS void rotate_run(float *values, size_t count)
{
    for (size_t i = 0; i < count; i += FLOATS) {
        Floats part = floats_at(values + i);
        part = BUTTERFLY(part, 1);
        part = BUTTERFLY(part, 2);
#if FLOATS > 4
        part = BUTTERFLY(part, 4);
#endif
#if FLOATS > 8
        part = BUTTERFLY(part, 8);
#endif
        store_at(values + i, part);
    }
    size_t h = FLOATS;
    for (; 2 * h < count; h *= 4)
        for (size_t top = 0; top < count; top += 4 * h)
            for (size_t i = top; i < top + h; i += FLOATS) {
                Floats a = floats_at(values + i), b = floats_at(values + i + h), c = floats_at(values + i + 2 * h),
                       d = floats_at(values + i + 3 * h), e = a + b, f = a - b, g = c + d, k = c - d;
                store_at(values + i, e + g);
                store_at(values + i + h, f + k);
                store_at(values + i + 2 * h, e - g);
                store_at(values + i + 3 * h, f - k);
            }
    for (; h < count; h *= 2)
        for (size_t i = 0; i < h; i += FLOATS) {
            Floats a = floats_at(values + i), b = floats_at(values + i + h);
            store_at(values + i, a + b);
            store_at(values + i + h, a - b);
        }
}

TARGET ALWAYS void rotate_row(float *values, const Rotation *rotation)
{
    for (size_t i = 0; i < rotation->columns; i += rotation->run) {
        if (rotation->run == 128)
            rotate_run(values + i, 128);
        else
            rotate_run(values + i, rotation->run);
    }
}

/* bf16 that is not above `value`; zero has one sign. */
TARGET ALWAYS uint16_t rounded_down(float value)
{
    uint32_t bits = bits_of(value);
    uint16_t found = (uint16_t)((bits + (bits >> 31 ? 0xFFFF : 0)) >> 16);
    return found == 0x8000 ? 0 : found;
}

typedef struct {
    float by, low, inverse;
} Share;

TARGET ALWAYS float least_of(Floats values)
{
    values = smaller(values, TURNED(values, 1));
    values = smaller(values, TURNED(values, 2));
#if FLOATS > 4
    values = smaller(values, TURNED(values, 4));
#endif
#if FLOATS > 8
    values = smaller(values, TURNED(values, 8));
#endif
    return values[0];
}

/* Scale and least value of a row, into both arrays as well. */
TARGET ALWAYS Share share_of(const float *values, size_t count, int bits, uint16_t *scale, uint16_t *low)
{
    Floats least = floats_at(values), most = least;
    for (size_t i = FLOATS; i < count; i += FLOATS) {
        Floats next = floats_at(values + i);
        least = smaller(next, least);
        most = larger(next, most);
    }
    float lowest = least_of(least), highest = -least_of(-most);
    *low = rounded_down(lowest);
    float amount = (highest - widened(*low)) / (float)((1 << bits) - 1);
    amount = amount > 0.0f ? MOST(amount, SCALE_MIN) : 0.0f; /* Zero has one sign here, too. */
    *scale = rounded_up(amount);
    return (Share){widened(*scale), widened(*low), amount > 0.0f ? 1.0f / widened(*scale) : 0.0f};
}

/* A byte of the bits `at` of eight codes. */
ALWAYS uint8_t bits_of_eight(const uint8_t *codes, int at)
{
    uint64_t eight;
    memcpy(&eight, codes, sizeof eight);
    return (uint8_t)((eight >> at & 0x0101010101010101u) * 0x0102040810204080u >> 56);
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

/* Codes of a row of one byte each, into their places: low halves in pairs, then a plane of bits for each further bit. */
TARGET ALWAYS void store_codes(const Rotation *rotation, uint8_t *codes, size_t row, const uint8_t *single)
{
    size_t columns = rotation->columns, plane = rotation->rows * columns / 8;
    uint8_t halves[RUN_MOST];
    if (rotation->bits == 8) {
        memcpy(codes + row * columns, single, columns);
        return;
    }
    for (size_t i = 0; i < columns; i++)
        halves[i] = single[i] & 0xF;
    pair_up(codes + row * columns / 2, halves, columns);
    uint8_t *further = codes + 4 * plane + row * columns / 8;
    for (int at = 4; at < rotation->bits; at++, further += plane)
        for (size_t i = 0; i < columns / 8; i++)
            further[i] = bits_of_eight(single + 8 * i, at);
}

TARGET ALWAYS void load_codes(const Rotation *rotation, uint8_t *single, size_t row, const uint8_t *codes)
{
    size_t columns = rotation->columns, plane = rotation->rows * columns / 8;
    if (rotation->bits == 8) {
        memcpy(single, codes + row * columns, columns);
        return;
    }
    for (size_t i = 0; i < columns / 2; i++) {
        uint8_t both = codes[row * columns / 2 + i];
        uint16_t pair = (uint16_t)((both & 0xF) | (both & 0xF0) << 4);
        memcpy(single + 2 * i, &pair, sizeof pair);
    }
    const uint8_t *further = codes + 4 * plane + row * columns / 8;
    for (int at = 4; at < rotation->bits; at++, further += plane)
        for (size_t i = 0; i < columns / 8; i++) {
            uint64_t eight, own = further[i] * 0x0101010101010101u & 0x8040201008040201u;
            /* The top bit of each byte says whether it is not zero. */
            uint64_t spread = ((own & 0x7F7F7F7F7F7F7F7Fu) + 0x7F7F7F7F7F7F7F7Fu) | own;
            memcpy(&eight, single + 8 * i, sizeof eight);
            eight |= (spread >> 7 & 0x0101010101010101u) << at;
            memcpy(single + 8 * i, &eight, sizeof eight);
        }
}

/* Undo the rotation of decoded values, as far as rounding lets it. */
TARGET ALWAYS void turn_back(uint16_t *x, float *values, const Rotation *rotation)
{
    float by = 1.0f / (float)rotation->run;
    rotate_row(values, rotation);
    for (size_t i = 0; i < rotation->columns; i++)
        x[i] = rounded(values[i] * by);
}

TARGET ALWAYS void code_row(const Rotation *rotation, uint8_t *single, float *values, Share share)
{
    for (size_t i = 0; i < rotation->columns; i += FLOATS) {
        Floats sum = (floats_at(values + i) - share.low) * share.inverse + 0x1p23f;
        store_words(single + i, (Vector)((Words)sum & 0xFF));
        store_at(values + i, (sum - 0x1p23f) * share.by + share.low);
    }
}

TARGET ALWAYS void add_losses(Sums *sums, const uint16_t *x, const uint16_t *y, size_t count, float by)
{
    uint16_t was_last[LANES] = {0}, came_last[LANES] = {0}; /* Zeros add nothing. */
    for (size_t i = 0; i < count; i += LANES) {
        const uint16_t *was = x + i, *came = y + i;
        if (count - i < LANES) {
            was = memcpy(was_last, was, 2 * (count - i));
            came = memcpy(came_last, came, 2 * (count - i));
        }
        for (int part = 0; part < PARTS; part++) {
            Words from = chunk_at(was + CHUNK * part), to = chunk_at(came + CHUNK * part);
            for (int odd = 0; odd < 2; odd++)
                add_loss(sums->lost[part] + odd, sums->all[part] + odd, half_of(from, odd), half_of(to, odd), by, FAR);
        }
    }
}

TARGET ALWAYS uint16_t largest_of(const uint16_t *x, size_t count)
{
    uint16_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        uint16_t magnitude = x[i] & 0x7FFF;
        largest = MOST(magnitude, largest);
    }
    return largest;
}

/* Fill scales, least values and codes; 0 where numbers are not finite, or too large to come back. */
TARGET static int pack_rotated(const Rotation *rotation, uint8_t *codes, uint16_t *scales, const uint16_t *x,
                               double *error)
{
    float values[RUN_MOST];
    uint8_t single[RUN_MOST];
    uint16_t back[RUN_MOST];
    Loss loss = {.by = 1.0f};
    Sums sums = {0};
    size_t columns = rotation->columns;
    uint16_t largest = largest_of(x, rotation->rows * columns);
    if (!begin_strip(&loss, largest) || largest >= ROTATED_BELOW)
        return 0;
    for (size_t row = 0; row < rotation->rows; row++, x += columns) {
        for (size_t i = 0; i < columns; i++)
            values[i] = widened(x[i]);
        for (size_t i = 0; i < columns; i += LINE / 2)
            __builtin_prefetch(x + rotation->rows * columns + i);
        rotate_row(values, rotation);
        Share share = share_of(values, columns, rotation->bits, scales + row, scales + rotation->rows + row);
        code_row(rotation, single, values, share);
        store_codes(rotation, codes, row, single);
        turn_back(back, values, rotation);
        add_losses(&sums, x, back, columns, loss.by);
        gather(&loss, &sums, row, rotation->rows);
    }
    *error = error_of(&loss);
    return 1;
}

/* 0 where scales are none that `pack_rotated` makes. */
TARGET static int unpack_rotated(const Rotation *rotation, uint16_t *x, const uint8_t *codes, const uint16_t *scales)
{
    float values[RUN_MOST];
    uint8_t single[RUN_MOST];
    if (largest_of(scales, 2 * rotation->rows) >= SHARE_BELOW)
        return 0;
    for (size_t row = 0; row < rotation->rows; row++, x += rotation->columns) {
        float by = widened(scales[row]), low = widened(scales[rotation->rows + row]);
        load_codes(rotation, single, row, codes);
        for (size_t i = 0; i < rotation->columns; i++)
            values[i] = (float)(int32_t)single[i] * by + low;
        turn_back(x, values, rotation);
    }
    return 1;
}
