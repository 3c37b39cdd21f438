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

#define CODES_OF(elements, bits) ((elements) / ((bits) == 8 ? 1 : 2))

/* Codes of row `row`, and the squares of what they lose in steps, and of all there is: a Hadamard matrix turns these
   alike, so nothing is turned back. */
TARGET ALWAYS void code_row_bounded(const Rotation *rotation, uint8_t *codes, size_t row, Turning *here, Shares shares,
                                    size_t columns, Floats lost[2], Floats all[2])
{
    UNROLLED
    for (size_t i = 0; i < columns / LANES; i++) {
        Coding coding;
        size_t at = row * columns + LANES * i;
        for (size_t part = 0; part < PARTS; part++)
            for (size_t odd = 0; odd < 2; odd++) {
                Floats value = here->values[2 * (PARTS * i + part) + odd];
                Coded coded = coded_int4(value, shares);
                lost[odd] = with_square(lost[odd], coded.off), all[odd] = with_square(all[odd], value);
                coding.codes[odd][part] = coded.code;
                coding.chunks[part] = (Words){0}; /* No signs are stored. */
            }
        if (rotation->bits == 4 || rotation->bits == 8)
            store_coding(codes + CODES_OF(at, rotation->bits), &coding, rotation->bits == 8 ? INT8 : INT4);
        else
            for (size_t part = 0; part < PARTS; part++)
                store_coded(rotation, codes, at + CHUNK * part, CHUNK, coding.codes[0][part], coding.codes[1][part]);
    }
}

/* Turn the rows from `top` on, as many as there are of SINGLE_ROWS, and find their scales; how many. So no row waits for
   the divisions of its own scale. */
TARGET ALWAYS size_t turn_rows(const Rotation *rotation, Turned *turned, Split *split, uint16_t *scales, size_t top,
                               const uint16_t *x, size_t columns, size_t run)
{
    size_t rows = LEAST(SINGLE_ROWS, rotation->rows - top);
    memset(turned->lowest, 0, sizeof turned->lowest);
    memset(turned->highest, 0, sizeof turned->highest);
    for (size_t row = 0; row < rows; row++)
        turn_row(turned, row, x + row * columns, columns, run);
    share_rows(split, turned, rotation->bits);
    for (size_t row = 0; row < rows; row++) {
        scales[top + row] = (uint16_t)(bits_of(split->by[row]) >> 16);
        scales[rotation->rows + top + row] = (uint16_t)(bits_of(split->low[row]) >> 16);
    }
    return rows;
}

/* A row of the next plane, while one at `x` is coded. */
TARGET ALWAYS void fetch_ahead(const Rotation *rotation, const uint16_t *x, size_t columns)
{
    for (size_t i = 0; i < columns; i += LINE / 2)
        __builtin_prefetch(x + rotation->rows * columns + i);
}

TARGET ALWAYS Shares shares_of_row(const Split *split, size_t row)
{
    return (Shares){everywhere(split->by[row]), everywhere(split->inverse[row]), everywhere(split->low[row]), {{0}, {0}}};
}

TARGET ALWAYS void turn_bounded(const Rotation *rotation, uint8_t *codes, uint16_t *scales, const uint16_t *x,
                                size_t columns, size_t run, Squares *squares)
{
    Turned turned;
    Split split;
    for (size_t top = 0; top < rotation->rows; top += SINGLE_ROWS, x += SINGLE_ROWS * columns) {
        Floats sum = {0}, all[2] = {{0}};
        size_t rows = turn_rows(rotation, &turned, &split, scales, top, x, columns, run);
        for (size_t row = 0; row < rows; row++) {
            Floats lost[2] = {{0}};
            Shares shares = shares_of_row(&split, row);
            fetch_ahead(rotation, x + row * columns, columns);
            code_row_bounded(rotation, codes, top + row, turned.rows + row, shares, columns, lost, all);
            sum += (lost[0] + lost[1]) * squared(shares.by);
        }
        add_squares(squares, sum, all[0] + all[1]);
    }
}

TARGET ALWAYS void pack_turned(const Rotation *rotation, uint8_t *codes, uint16_t *scales, size_t top, const uint16_t *x,
                               size_t columns, size_t run, Loss *loss, int how)
{
    Turned turned;
    Split split;
    Sums sums = {0};
    size_t rows = turn_rows(rotation, &turned, &split, scales, top, x, columns, run);
    for (size_t row = 0; row < rows; row++) {
        Shares shares = shares_of_row(&split, row);
        fetch_ahead(rotation, x + row * columns, columns);
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

/* As `pack_bounded`. */
TARGET static int rotate_bounded(const Rotation *rotation, uint8_t *codes, uint16_t *scales, const uint16_t *x,
                                 Bounds *bounds)
{
    Squares squares = {0};
    size_t columns = rotation->columns;
    int is_known = columns % LANES == 0 && is_near(largest_of(x, rotation->rows * columns));
    if (is_known && columns == 128)
        turn_bounded(rotation, codes, scales, x, 128, 128, &squares);
    else if (is_known)
        turn_bounded(rotation, codes, scales, x, columns, rotation->run, &squares);
    *bounds = bounds_of(&squares, INT4);
    return is_known;
}

typedef int32_t Integers __attribute__((vector_size(4 * FLOATS)));
#define PLACES (((Words){0} + 1u) << 2 * (Words)NUMBERS) /* Of the bits of elements at even places. */

/* Codes of a chunk from element `at` on, of which there are `count`: in the low bits of words those at even places, from
   bit `bits` or 4 on those at odd ones. */
TARGET ALWAYS Words pairs_of_codes(const uint8_t *codes, size_t at, size_t count, int bits)
{
    uint8_t here[CHUNK] = {0};
    if (bits == 8 && count == CHUNK)
        return (Words)words_of_pairs(codes + at);
    if (bits < 8 && count == CHUNK)
        return (Words)words_of_bytes(codes + at / 2);
    memcpy(here, codes + CODES_OF(at, bits), CODES_OF(count, bits));
    return (Words)(bits == 8 ? words_of_pairs(here) : words_of_bytes(here));
}

TARGET ALWAYS Floats codes_of(Words pairs, const Rotation *rotation, const uint8_t *codes, size_t at, size_t count,
                              int bits, int odd)
{
    size_t plane = rotation->rows * rotation->columns / 8;
    Words found = bits == 8 ? pairs >> (8 * odd) & 0xFF : pairs >> (4 * odd) & 0xF;
    for (int bit = 4; bit < bits && bits < 8; bit++) {
        uint32_t further = 0;
        memcpy(&further, codes + (size_t)bit * plane + at / 8, count / 8);
        Words own = ((Words){0} + (further >> odd)) & PLACES;
        found |= (Words)(own != 0) & (1u << bit);
    }
    return __builtin_convertvector((Integers)found, Floats);
}

TARGET ALWAYS void unpack_row(const Rotation *rotation, uint16_t *x, const uint8_t *codes, size_t row, float by,
                              float low, size_t columns, size_t run, int bits)
{
    Turning here;
    size_t chunks = chunks_of(columns);
    UNROLLED
    for (size_t i = 0; i < chunks; i++) {
        size_t at = row * columns + CHUNK * i, count = LEAST(CHUNK, columns - CHUNK * i);
        Words pairs = pairs_of_codes(codes, at, count, bits);
        for (int odd = 0; odd < 2; odd++)
            here.values[2 * i + (size_t)odd] = codes_of(pairs, rotation, codes, at, count, bits, odd) * by + low;
    }
    rotate(here.values, chunks, run);
    UNROLLED
    for (size_t i = 0; i < chunks; i++) {
        Words even = (Words)rounded_to_bf16(here.values[2 * i] * (1.0f / (float)run));
        Words chunk = even >> 16 | (Words)rounded_to_bf16(here.values[2 * i + 1] * (1.0f / (float)run));
        memcpy(x + CHUNK * i, &chunk, 2 * LEAST(CHUNK, columns - CHUNK * i));
    }
}

/* Most heads have 128 channels. */
TARGET ALWAYS void unpack_most(const Rotation *rotation, uint16_t *x, const uint8_t *codes, size_t row, float by,
                               float low)
{
    switch (rotation->bits) {
    case 4: unpack_row(rotation, x, codes, row, by, low, 128, 128, 4); break;
    case 5: unpack_row(rotation, x, codes, row, by, low, 128, 128, 5); break;
    case 6: unpack_row(rotation, x, codes, row, by, low, 128, 128, 6); break;
    case 8: unpack_row(rotation, x, codes, row, by, low, 128, 128, 8); break;
    }
}

/* 0 where scales are none that `pack_rotated` makes. */
TARGET static int unpack_rotated(const Rotation *rotation, uint16_t *x, const uint8_t *codes, const uint16_t *scales)
{
    if (largest_of(scales, 2 * rotation->rows) >= SHARE_BELOW)
        return 0;
    for (size_t row = 0; row < rotation->rows; row++, x += rotation->columns) {
        float by = widened(scales[row]), low = widened(scales[rotation->rows + row]);
        if (rotation->columns == 128)
            unpack_most(rotation, x, codes, row, by, low);
        else
            unpack_row(rotation, x, codes, row, by, low, rotation->columns, rotation->run, rotation->bits);
    }
    return 1;
}
