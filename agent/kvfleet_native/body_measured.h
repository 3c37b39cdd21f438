/* Packing that measures what it loses, in one pass over a plane that lies in the first cache; part of body.h.

   Codes and scales are those of `pack`. Errors are sums of squares in lanes whose order is fixed, in single precision over
   a few rows and in double precision over these: equal to the bit at every level (`python_mixing.py`). Numbers are brought
   below 2 by a power of two before they are squared, so nothing overflows, and what underflows is nothing beside them. */

#define PARTS (LANES / CHUNK)
#define SINGLE_ROWS 16 /* Of so many rows at most squares are added in single precision. */

typedef float Floats __attribute__((vector_size(4 * FLOATS)));
typedef uint32_t Words __attribute__((vector_size(4 * FLOATS)));

/* Sums of squares over some rows, times by^2: of what is lost, and of all there is. */
typedef struct {
    Floats lost[PARTS][2], all[PARTS][2]; /* Of elements at even places, and at odd ones. */
} Sums;

/* The same of all rows, neighbours together. */
typedef struct {
    double lost[LANES / 2], all[LANES / 2];
    float by;       /* A power of two that brings numbers below 2. */
    double inverse; /* Of by^2. */
} Loss;

/* Numbers for the elements of a vector. Where all have one scale, what codes come back as may be looked up. */
typedef struct {
    Floats by, inverse, low, table[2];
} Shares;

/* Scales of columns: of each chunk those at even places first. */
typedef struct {
    float by[STRIP + LANES], inverse[STRIP + LANES], low[STRIP + LANES];
} Split;

typedef struct {
    Words code;  /* In the low bits; what stands above them means nothing. */
    Floats back; /* Not rounded yet. */
    Words place; /* In the low bits: where it stands in a table. */
    Floats unit; /* Of what stands there. */
} Coded;

TARGET ALWAYS Floats floats_at(const float *values)
{
    Floats found;
    memcpy(&found, values, sizeof found);
    return found;
}

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

/* As fp8_of does it, but for its bound: scales are such that nothing is rounded to more than 448. What is added to the
   rounder beside its power makes the sum's low bits and the power's give the code by one addition. */
TARGET ALWAYS Coded coded_fp8(Floats magnitudes, Shares shares)
{
    const uint32_t normal_from = 0x3C800000, rounder_above = (20u << 23) + (256 * 5 - (normal_from >> 20) - 160);
    Floats scaled = magnitudes * shares.inverse;
    Words power = (Words)larger(scaled, (Floats){0} + float_of(normal_from)) & 0x7F800000;
    Floats rounder = (Floats)(power + rounder_above), sum = scaled + rounder;
    return (Coded){(Words)sum + ((Words)sum >> 20), (sum - rounder) * shares.by, (Words)sum, (Floats)power};
}

TARGET ALWAYS Coded coded_int8(Floats values, Shares shares)
{
    Floats sum = values * shares.inverse + 0x1.8p23f;
    return (Coded){.code = (Words)sum, .back = (sum - 0x1.8p23f) * shares.by};
}

TARGET ALWAYS Coded coded_int4(Floats values, Shares shares)
{
    Floats sum = (values - shares.low) * shares.inverse + 0x1p23f;
    return (Coded){(Words)sum, (sum - 0x1p23f) * shares.by + shares.low, (Words)sum, (Floats){0} + 1.0f};
}

TARGET ALWAYS Floats rounded_to_bf16(Floats values)
{
    Words bits = (Words)values, added = (Words)sum_halves((Vector)((bits & 0x10000) | 0x7FFF));
    return (Floats)((bits + added) & 0xFFFF0000);
}

#if FLOATS == 4
#define NUMBERS {0, 1, 2, 3}
#elif FLOATS == 8
#define NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#endif

/* Shares of elements that have one scale. Of e4m3 the eighths of a power of two that a code is worth stand in the table,
   0 to 16 of them, from `rounder_above` on; rounding them to bf16 there is rounding them at any power. */
TARGET ALWAYS Shares with_table(Shares shares, int kind)
{
    for (int i = 0; i < 2; i++) {
        Words place = (Words)NUMBERS + (uint32_t)(FLOATS * i);
        Words steps = kind == FP8 ? (place + 8) & 31 : place;
        Floats values = __builtin_convertvector(steps, Floats) * (kind == FP8 ? 0.125f : 1.0f);
        shares.table[i] = rounded_to_bf16(kind == FP8 ? values * shares.by : values * shares.by + shares.low);
    }
    return shares;
}

/* What a code comes back as. */
TARGET ALWAYS Floats came_back(Coded coded, Shares shares, int kind, int is_tabled)
{
#ifdef HAS_TABLES
    if (is_tabled && kind == FP8)
        return looked_up(shares.table[0], shares.table[1], (Vector)coded.place) * coded.unit;
    if (is_tabled && kind == INT4)
        return looked_up(shares.table[0], shares.table[1], (Vector)coded.place);
#else
    (void)shares, (void)kind, (void)is_tabled;
#endif
    return rounded_to_bf16(coded.back);
}

TARGET ALWAYS void add_loss(Floats *lost, Floats *all, Floats was, Floats came, float by, int is_far)
{
    Floats difference = was - came;
    if (is_far)
        difference *= by, was *= by;
    *lost += difference * difference;
    *all += was * was;
}

/* Codes of half a chunk, and the squares of what they lose and are, times by^2; `by` is 1 where not `is_far`. */
TARGET ALWAYS Words code_half(Floats *lost, Floats *all, Floats was, Shares shares, float by, int kind, int is_far,
                              int is_tabled)
{
    Coded coded = kind == FP8    ? coded_fp8(was, shares)
                  : kind == INT8 ? coded_int8(was, shares)
                                 : coded_int4(was, shares);
    add_loss(lost, all, was, came_back(coded, shares, kind, is_tabled), by, is_far);
    return coded.code;
}

TARGET ALWAYS void store_chunk(uint8_t *codes, Words even, Words odd, Words chunk, int kind)
{
    Words both = (even & 0xFFFF) | odd << 16;
    if (kind == INT4)
        store_words(codes, (Vector)((even & 0xF) | (odd & 0xF) << 4));
    else if (kind == INT8)
        store_halves(codes, (Vector)both);
    else
        store_halves(codes, (Vector)((both & 0x7F007F) | (chunk >> 8 & 0x800080)));
}

TARGET ALWAYS void code_chunk(uint8_t *codes, const uint16_t *x, Floats *lost, Floats *all, const Shares *shares,
                              float by, int kind, int is_far, int is_tabled)
{
    Words chunk = chunk_at(x), valued = kind == FP8 ? chunk & 0x7FFF7FFF : chunk;
    Words even = code_half(lost, all, half_of(valued, 0), shares[0], by, kind, is_far, is_tabled);
    Words odd = code_half(lost + 1, all + 1, half_of(valued, 1), shares[1], by, kind, is_far, is_tabled);
    store_chunk(codes, even, odd, chunk, kind);
}

TARGET ALWAYS Shares shares_at(const Split *split, size_t i, int kind)
{
    return (Shares){floats_at(split->by + i), floats_at(split->inverse + i),
                    kind == INT4 ? floats_at(split->low + i) : (Floats){0}, {{0}, {0}}};
}

TARGET ALWAYS Shares shares_of_all(const Strip *strip, size_t i, int kind)
{
    return (Shares){(Floats){0} + strip->by[i], (Floats){0} + strip->inverse[i],
                    (Floats){0} + (kind == INT4 ? strip->low[i] : 0.0f), {{0}, {0}}};
}

TARGET ALWAYS void split_numbers(float *restrict split, const float *restrict numbers, size_t count)
{
    for (size_t left = 0; left < count; left += CHUNK)
        for (size_t i = 0; i < FLOATS; i++) {
            split[left + i] = numbers[left + 2 * i];
            split[left + FLOATS + i] = numbers[left + 2 * i + 1];
        }
}

TARGET ALWAYS void split_shares(Split *split, const Strip *strip, size_t count, int kind)
{
    split_numbers(split->by, strip->by, count);
    split_numbers(split->inverse, strip->inverse, count);
    if (kind == INT4)
        split_numbers(split->low, strip->low, count);
}

/* The last elements of a row, fewer than LANES; scales of `split` are those from `first` on. */
TARGET ALWAYS void code_last(uint8_t *codes, const uint16_t *x, size_t count, Sums *sums, const Split *split,
                             size_t first, const Shares *fixed, float by, int kind)
{
    uint16_t padded[LANES] = {0};
    uint8_t made[LANES];
    memcpy(padded, x, 2 * count);
    for (int part = 0; part < PARTS; part++) {
        size_t at = (size_t)(CHUNK * part);
        Floats lost[2] = {{0}}, all[2] = {{0}};
        Shares shares[2] = {fixed[0], fixed[1]};
        if (split != NULL)
            shares[0] = shares_at(split, first + at, kind), shares[1] = shares_at(split, first + at + FLOATS, kind);
        code_chunk(made + CODES(at), padded + at, lost, all, shares, by, kind, 1, 0);
        for (size_t i = at; i < LEAST(count, at + CHUNK); i++) {
            sums->lost[part][i % 2][(i - at) / 2] += lost[i % 2][(i - at) / 2];
            sums->all[part][i % 2][(i - at) / 2] += all[i % 2][(i - at) / 2];
        }
    }
    memcpy(codes, made, CODES(count));
}

/* `encode_strip`, measured. Scales are those of `split` where it is given, else `fixed` for all. */
TARGET ALWAYS void encode_measured(uint8_t *codes, const uint16_t *x, size_t count, size_t ahead, Sums *sums,
                                   const Split *split, const Shares *fixed, float by, int kind, int is_far)
{
    Shares shares[2] = {fixed[0], fixed[1]};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        __builtin_prefetch(x + ahead + i);
        for (int part = 0; part < PARTS; part++) {
            size_t at = i + (size_t)(CHUNK * part);
            if (split != NULL)
                shares[0] = shares_at(split, at, kind), shares[1] = shares_at(split, at + FLOATS, kind);
            code_chunk(codes + CODES(at), x + at, sums->lost[part], sums->all[part], shares, by, kind, is_far,
                       split == NULL && !is_far);
        }
    }
    if (i < count)
        code_last(codes + CODES(i), x + i, count - i, sums, split, i, fixed, by, kind);
}

TARGET ALWAYS void add_lanes(double *lanes, Floats values, double inverse)
{
    for (int lane = 0; lane < FLOATS; lane++)
        lanes[lane] += (double)values[lane] * inverse;
}

/* Single precision to double, after each SINGLE_ROWS rows and after the last one. */
TARGET ALWAYS void gather(Loss *loss, Sums *sums, size_t row, size_t rows)
{
    if (row % SINGLE_ROWS != SINGLE_ROWS - 1 && row != rows - 1)
        return;
    for (int part = 0; part < PARTS; part++) {
        add_lanes(loss->lost + FLOATS * part, sums->lost[part][0] + sums->lost[part][1], loss->inverse);
        add_lanes(loss->all + FLOATS * part, sums->all[part][0] + sums->all[part][1], loss->inverse);
    }
    *sums = (Sums){0};
}

#define NEAR_FROM 0x3000 /* bf16 of 2^-31 and of 2^33: squares of such numbers are numbers. */
#define NEAR_TO 0x5000

/* A power of two for magnitudes up to `largest`; 0 where one is not finite, or too large to come back. */
TARGET ALWAYS int begin_strip(Loss *loss, uint16_t largest)
{
    int is_near = largest >= NEAR_FROM && largest < NEAR_TO;
    loss->by = is_near ? 1.0f : float_of((254u - (largest >> 7)) << 23);
    loss->inverse = 1.0 / ((double)loss->by * (double)loss->by);
    return largest < TOO_LARGE;
}

/* Rows of a strip, each with a scale of its own. */
TARGET ALWAYS void encode_rows(const Grid *grid, uint8_t *codes, const uint16_t *x, const Strip *strip, size_t rows,
                               Loss *loss, int kind, int is_far)
{
    Sums sums = {0};
    for (size_t row = 0; row < rows; row++) {
        Shares all = with_table(shares_of_all(strip, row, kind), kind), fixed[2] = {all, all};
        for (size_t left = 0; left < grid->columns; left += STRIP) {
            size_t at = row * grid->columns + left, count = LEAST(STRIP, grid->columns - left);
            encode_measured(codes + CODES(at), x + at, count, grid->rows * grid->columns, &sums, NULL, fixed, loss->by,
                            kind, is_far);
        }
        gather(loss, &sums, row, rows);
    }
}

TARGET ALWAYS int pack_rows_measured(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x, Loss *loss,
                                     int kind)
{
    Strip strip;
    for (size_t top = 0; top < grid->rows; top += STRIP) {
        size_t rows = LEAST(STRIP, grid->rows - top), at = top * grid->columns;
        for (size_t row = 0; row < rows; row++)
            bound_row(&strip, row, x + at + row * grid->columns, grid->columns, kind);
        if (!begin_strip(loss, scale(&strip, scales + top, scales + grid->rows + top, rows, kind)))
            return 0;
        if (loss->by == 1.0f)
            encode_rows(grid, codes + CODES(at), x + at, &strip, rows, loss, kind, 0);
        else
            encode_rows(grid, codes + CODES(at), x + at, &strip, rows, loss, kind, 1);
    }
    return 1;
}

/* Columns of a strip, each with a scale of its own. */
TARGET ALWAYS void encode_columns(const Grid *grid, uint8_t *codes, const uint16_t *x, const Strip *strip, size_t wide,
                                  Loss *loss, int kind, int is_far)
{
    Shares none[2] = {0};
    Sums sums = {0};
    Split split;
    split_shares(&split, strip, wide, kind);
    for (size_t row = 0; row < grid->rows; row++) {
        size_t at = row * grid->columns;
        encode_measured(codes + CODES(at), x + at, wide, grid->rows * grid->columns, &sums, &split, none, loss->by, kind,
                        is_far);
        gather(loss, &sums, row, grid->rows);
    }
}

TARGET ALWAYS int pack_columns_measured(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x,
                                        Loss *loss, int kind)
{
    Strip strip;
    for (size_t left = 0; left < grid->columns; left += STRIP) {
        size_t wide = LEAST(STRIP, grid->columns - left);
        bound_columns(&strip, x + left, grid->rows, grid->columns, wide, kind);
        if (!begin_strip(loss, scale(&strip, scales + left, scales + grid->columns + left, wide, kind)))
            return 0;
        if (loss->by == 1.0f)
            encode_columns(grid, codes + CODES(left), x + left, &strip, wide, loss, kind, 0);
        else
            encode_columns(grid, codes + CODES(left), x + left, &strip, wide, loss, kind, 1);
    }
    return 1;
}

/* Halves onto each other, until one is left. */
TARGET ALWAYS double sum_of_lanes(double *lanes)
{
    for (int half = LANES / 4; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            lanes[lane] += lanes[half + lane];
    return lanes[0];
}

TARGET ALWAYS double error_of(Loss *loss)
{
    double lost = sum_of_lanes(loss->lost);
    return lost == 0.0 ? 0.0 : __builtin_sqrt(lost / sum_of_lanes(loss->all));
}

/* `pack` of a plane, and ||x - x'|| / ||x||; 0 where a value is not finite, or too large to come back. */
TARGET static int pack_measured(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x, double *error)
{
    Loss loss = {.by = 1.0f};
    int is_packed = 0;
    switch (grid->kind * 2 + grid->is_by_column) {
    case FP8 * 2: is_packed = pack_rows_measured(grid, codes, scales, x, &loss, FP8); break;
    case INT8 * 2: is_packed = pack_rows_measured(grid, codes, scales, x, &loss, INT8); break;
    case INT8 * 2 + 1: is_packed = pack_columns_measured(grid, codes, scales, x, &loss, INT8); break;
    case INT4 * 2: is_packed = pack_rows_measured(grid, codes, scales, x, &loss, INT4); break;
    case INT4 * 2 + 1: is_packed = pack_columns_measured(grid, codes, scales, x, &loss, INT4); break;
    }
    *error = error_of(&loss);
    return is_packed;
}
