/* Rows whose channels are mixed before they are packed; part of body.h. `forms.py` says what the codes mean,
   `python.py` is the oracle: equal to the bit.

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

/* Where counts are known nothing is counted, and a row stays in registers. */
#ifdef __clang__
#define UNROLLED /* It does so by itself, and would complain where they are not. */
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

#define SIGNS(h) ((Floats)(0x3F800000 | ((Words)(((Words)NUMBERS & (h)) != 0) & 0x80000000)))

/* Their sums and differences. */
#define BUTTERFLY(values, h) add_signed(TURNED(values, h), values, SIGNS(h))

/* A row: of each chunk the elements at even places, then those at odd ones. */
typedef struct {
    Floats values[2 * RUN_MOST / CHUNK];
} Turning;

TARGET ALWAYS size_t chunks_of(size_t columns) { return (columns + CHUNK - 1) / CHUNK; }

/* Multiply the runs of a row by the Hadamard matrix. Runs are powers of two from RUN_LEAST on. */
TARGET ALWAYS void rotate(Floats *values, size_t chunks, size_t run)
{
    UNROLLED
    for (size_t i = 0; i < 2 * chunks; i += 2) {
        Floats even = values[i] + values[i + 1], odd = values[i] - values[i + 1];
        even = BUTTERFLY(even, 1), odd = BUTTERFLY(odd, 1);
        even = BUTTERFLY(even, 2), odd = BUTTERFLY(odd, 2);
#if FLOATS > 4
        even = BUTTERFLY(even, 4), odd = BUTTERFLY(odd, 4);
#endif
#if FLOATS > 8
        if (run > FLOATS)
            even = BUTTERFLY(even, 8), odd = BUTTERFLY(odd, 8);
#endif
        values[i] = even, values[i + 1] = odd;
    }
    UNROLLED
    for (size_t step = 2; step * FLOATS < run; step *= 2)
        UNROLLED
        for (size_t top = 0; top < 2 * chunks; top += 2 * step)
            UNROLLED
            for (size_t i = top; i < top + step; i++) {
                Floats a = values[i], b = values[i + step];
                values[i] = a + b;
                values[i + step] = a - b;
            }
}

/* What there is of a last chunk of half its length, and in place of the other half the same or nothing. */
TARGET ALWAYS Floats whole(Floats values, size_t i, size_t columns, int is_doubled)
{
#if FLOATS > 8
    if (columns % CHUNK != 0 && i + CHUNK > columns) {
        Words is_there = (Words)((Words)NUMBERS < FLOATS / 2);
        Words other = is_doubled ? (Words)TURNED(values, 8) : (Words){0};
        return (Floats)(((Words)values & is_there) | (other & ~is_there));
    }
#endif
    (void)i, (void)columns, (void)is_doubled;
    return values;
}

TARGET ALWAYS Words chunk_of_row(const uint16_t *x, size_t i, size_t columns)
{
    Words found = {0};
    memcpy(&found, x + i, 2 * LEAST(CHUNK, columns - i));
    return found;
}

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

/* Some rows: what they are turned to, and between what it lies. */
typedef struct {
    Turning rows[SINGLE_ROWS];
    float lowest[SINGLE_ROWS], highest[SINGLE_ROWS];
} Turned;

TARGET ALWAYS void turn_row(Turned *turned, size_t row, const uint16_t *x, size_t columns, size_t run)
{
    Turning here;
    size_t chunks = chunks_of(columns);
    here.values[0] = (Floats){0}; /* No row is empty, but compilers do not know that. */
    UNROLLED
    for (size_t i = 0; i < chunks; i++) {
        Words chunk = chunk_of_row(x, CHUNK * i, columns);
        here.values[2 * i] = half_of(chunk, 0), here.values[2 * i + 1] = half_of(chunk, 1);
    }
    rotate(here.values, chunks, run);
    Floats least = whole(here.values[0], 0, columns, 1), most = least;
    UNROLLED
    for (size_t i = 0; i < 2 * chunks; i++) {
        Floats next = whole(here.values[i], i / 2 * CHUNK, columns, 1);
        least = smaller(next, least), most = larger(next, most);
        turned->rows[row].values[i] = here.values[i];
    }
    turned->lowest[row] = least_of(least), turned->highest[row] = -least_of(-most);
}

/* Scales and least values of rows, these rounded down; zero has one sign. */
TARGET ALWAYS void share_rows(Split *split, const Turned *turned, int bits)
{
    for (size_t row = 0; row < SINGLE_ROWS; row += FLOATS) {
        Words low = (Words)floats_at(turned->lowest + row);
        low = (low + (-(low >> 31) & 0xFFFF)) & 0xFFFF0000;
        low &= (Words)(low != 0x80000000);
        store_at(split->low + row, (Floats)low);
        scale_half(split, row, (floats_at(turned->highest + row) - (Floats)low) / (float)((1 << bits) - 1));
    }
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

/* Codes of a chunk into their places: low halves in pairs, then a plane of bits for each further bit. */
TARGET ALWAYS void store_coded(const Rotation *rotation, uint8_t *codes, size_t at, size_t count, Words even, Words odd)
{
    size_t plane = rotation->rows * rotation->columns / 8;
    uint8_t single[CHUNK] = {0}, made[CHUNK];
    int kind = rotation->bits == 8 ? INT8 : INT4;
    if (count == CHUNK) {
        store_chunk(codes + CODES(at), even, odd, even, kind);
    } else {
        store_chunk(made, even, odd, even, kind);
        memcpy(codes + CODES(at), made, CODES(count));
    }
    if (rotation->bits == 5 || rotation->bits == 6)
        store_lowest_bytes(single, (Vector)even, (Vector)odd);
    for (int bit = 4; bit < rotation->bits && kind == INT4; bit++)
        for (size_t i = 0; i < count; i += 8)
            codes[bit * plane + (at + i) / 8] = bits_of_eight(single + i, bit);
}

/* Codes of row `row`, and what they lose. */
TARGET ALWAYS void code_row(const Rotation *rotation, uint8_t *codes, size_t row, const uint16_t *x, Turning *here,
                            Shares shares, size_t columns, size_t run, Sums *sums, float by, int how)
{
    size_t chunks = chunks_of(columns);
    Turning back;
    UNROLLED
    for (size_t i = 0; i < chunks; i++) {
        Words code[2];
        for (int odd = 0; odd < 2; odd++) {
            Coded coded = coded_int4(here->values[2 * i + (size_t)odd], shares);
            code[odd] = coded.code, back.values[2 * i + (size_t)odd] = coded.back;
        }
        store_coded(rotation, codes, row * columns + CHUNK * i, LEAST(CHUNK, columns - CHUNK * i), code[0], code[1]);
    }
    rotate(back.values, chunks, run);
    UNROLLED
    for (size_t i = 0; i < chunks; i++) {
        Words chunk = chunk_of_row(x, CHUNK * i, columns);
        for (int odd = 0; odd < 2; odd++) {
            Floats came = rounded_to_bf16(back.values[2 * i + (size_t)odd] * (1.0f / (float)run));
            came = whole(came, CHUNK * i, columns, 0);
            add_loss(sums->lost[i % PARTS] + odd, sums->all[i % PARTS] + odd, half_of(chunk, odd), came, by, how);
        }
    }
}

/* Some rows in phases, so that no row waits for the divisions of its own scale. */
TARGET ALWAYS void pack_turned(const Rotation *rotation, uint8_t *codes, uint16_t *scales, size_t top, const uint16_t *x,
                               size_t columns, size_t run, Loss *loss, int how)
{
    Turned turned;
    Split split;
    Sums sums = {0};
    memset(turned.lowest, 0, sizeof turned.lowest);
    memset(turned.highest, 0, sizeof turned.highest);
    size_t rows = LEAST(SINGLE_ROWS, rotation->rows - top);
    for (size_t row = 0; row < rows; row++)
        turn_row(&turned, row, x + row * columns, columns, run);
    share_rows(&split, &turned, rotation->bits);
    for (size_t row = 0; row < rows; row++) {
        Shares shares = {everywhere(split.by[row]), everywhere(split.inverse[row]), everywhere(split.low[row]),
                         {{0}, {0}}};
        scales[top + row] = (uint16_t)(bits_of(split.by[row]) >> 16);
        scales[rotation->rows + top + row] = (uint16_t)(bits_of(split.low[row]) >> 16);
        for (size_t i = 0; i < columns; i += LINE / 2)
            __builtin_prefetch(x + row * columns + rotation->rows * columns + i);
        code_row(rotation, codes, top + row, x + row * columns, turned.rows + row, shares, columns, run, &sums, loss->by,
                 how);
        gather(loss, &sums, row, rows);
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
    Loss loss = {.by = 1.0f};
    size_t columns = rotation->columns;
    uint16_t largest = largest_of(x, rotation->rows * columns);
    if (!begin_strip(&loss, largest) || largest >= ROTATED_BELOW)
        return 0;
    for (size_t top = 0; top < rotation->rows; top += SINGLE_ROWS, x += SINGLE_ROWS * columns) {
        if (columns == 128 && loss.by == 1.0f)
            pack_turned(rotation, codes, scales, top, x, 128, 128, &loss, NEAR);
        else
            pack_turned(rotation, codes, scales, top, x, columns, rotation->run, &loss, FAR);
    }
    *error = error_of(&loss);
    return 1;
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

TARGET ALWAYS void unpack_row(uint16_t *x, const uint8_t *single, float by, float low, size_t columns,
                              size_t run)
{
    Turning here;
    size_t chunks = chunks_of(columns);
    UNROLLED
    for (size_t i = 0; i < chunks; i++)
        for (int odd = 0; odd < 2; odd++) {
            Floats codes = {0};
            for (size_t lane = 0; lane < FLOATS; lane++)
                codes[lane] = (float)(int32_t)single[CHUNK * i + 2 * lane + (size_t)odd];
            here.values[2 * i + (size_t)odd] = codes * by + low;
        }
    rotate(here.values, chunks, run);
    UNROLLED
    for (size_t i = 0; i < chunks; i++) {
        Words even = (Words)rounded_to_bf16(here.values[2 * i] * (1.0f / (float)run));
        Words chunk = even >> 16 | (Words)rounded_to_bf16(here.values[2 * i + 1] * (1.0f / (float)run));
        memcpy(x + CHUNK * i, &chunk, 2 * LEAST(CHUNK, columns - CHUNK * i));
    }
}

/* 0 where scales are none that `pack_rotated` makes. */
TARGET static int unpack_rotated(const Rotation *rotation, uint16_t *x, const uint8_t *codes, const uint16_t *scales)
{
    uint8_t single[RUN_MOST] = {0};
    if (largest_of(scales, 2 * rotation->rows) >= SHARE_BELOW)
        return 0;
    for (size_t row = 0; row < rotation->rows; row++, x += rotation->columns) {
        float by = widened(scales[row]), low = widened(scales[rotation->rows + row]);
        load_codes(rotation, single, row, codes);
        if (rotation->columns == 128)
            unpack_row(x, single, by, low, 128, 128);
        else
            unpack_row(x, single, by, low, rotation->columns, rotation->run);
    }
    return 1;
}
