/* Packing that measures what it loses, in one pass over a plane that lies in the first cache; part of body.h.

   Codes and scales are those of `pack`. Errors are sums of squares in lanes whose order is fixed, in single precision over
   a few rows and in double precision over these: equal to the bit at every level (`python_mixing.py`). Numbers are brought
   below 2 by a power of two before they are squared, so nothing overflows, and what underflows is nothing beside them. */

#define PARTS (LANES / FLOATS)
#define SINGLE_ROWS 8 /* Of so many rows at most squares are added in single precision. */

typedef float Floats __attribute__((vector_size(4 * FLOATS)));
typedef uint32_t Words __attribute__((vector_size(4 * FLOATS)));
typedef uint16_t Halves __attribute__((vector_size(2 * FLOATS)));

/* Sums of squares: of what is lost, and of all there is. */
typedef struct {
    float lost[LANES], all[LANES]; /* Of some rows, times by^2. */
    double lost_sums[LANES], all_sums[LANES];
    float by;
} Loss;

/* Numbers for the elements of a vector. */
typedef struct {
    Floats by, inverse, low;
} Shares;

typedef struct {
    Words code;
    Floats was, back; /* `back` is not rounded yet. */
} Coded;

TARGET ALWAYS Floats floats_at(const float *values)
{
    Floats found;
    memcpy(&found, values, sizeof found);
    return found;
}

TARGET ALWAYS Words words_at(const uint16_t *x)
{
    Halves halves;
    memcpy(&halves, x, sizeof halves);
    return __builtin_convertvector(halves, Words);
}

TARGET ALWAYS Words larger(Words a, Words b)
{
    Words is_first = (Words)(a > b);
    return (a & is_first) | (b & ~is_first);
}

/* As fp8_of does it, but for its bound: scales are such that nothing is rounded to more than 448. */
TARGET ALWAYS Coded coded_fp8(Words x, Shares shares)
{
    const uint32_t normal_from = 0x3C800000;
    Floats was = (Floats)((x & 0x7FFF) << 16), scaled = was * shares.inverse;
    Words power = larger((Words)scaled & 0x7F800000, (Words){0} + normal_from);
    Floats rounder = (Floats)(power + (20u << 23)), sum = scaled + rounder;
    Words code = ((power - normal_from) >> 20) + ((Words)sum & 0x1F);
    return (Coded){code | (x >> 8 & 0x80), was, (sum - rounder) * shares.by};
}

TARGET ALWAYS Coded coded_int8(Words x, Shares shares)
{
    Floats was = (Floats)(x << 16), sum = was * shares.inverse + 0x1.8p23f;
    return (Coded){(Words)sum & 0xFF, was, (sum - 0x1.8p23f) * shares.by};
}

TARGET ALWAYS Coded coded_int4(Words x, Shares shares)
{
    Floats was = (Floats)(x << 16), sum = (was - shares.low) * shares.inverse + 0x1p23f;
    return (Coded){(Words)sum & 0xF, was, (sum - 0x1p23f) * shares.by + shares.low};
}

TARGET ALWAYS Floats rounded_to_bf16(Floats values)
{
    Words bits = (Words)values;
    return (Floats)((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000);
}

/* Codes of a vector's elements, and the squares of what they lose and are, times by^2; `by` is 1 where not `is_far`. */
TARGET ALWAYS Words code_vector(Floats *lost, Floats *all, const uint16_t *x, Shares shares, float by, int kind,
                                int is_far)
{
    Words words = words_at(x);
    Coded coded = kind == FP8    ? coded_fp8(words, shares)
                  : kind == INT8 ? coded_int8(words, shares)
                                 : coded_int4(words, shares);
    Floats difference = coded.was - rounded_to_bf16(coded.back);
    if (is_far)
        difference *= by, coded.was *= by;
    *lost = difference * difference;
    *all = coded.was * coded.was;
    return coded.code;
}

TARGET ALWAYS Shares shares_at(const Strip *strip, size_t i, int kind)
{
    return (Shares){floats_at(strip->by + i), floats_at(strip->inverse + i),
                    kind == INT4 ? floats_at(strip->low + i) : (Floats){0}};
}

TARGET ALWAYS Shares shares_of_all(const Strip *strip, size_t i, int kind)
{
    return (Shares){(Floats){0} + strip->by[i], (Floats){0} + strip->inverse[i],
                    (Floats){0} + (kind == INT4 ? strip->low[i] : 0.0f)};
}

/* The last elements of a row, fewer than LANES. */
TARGET ALWAYS void code_last(const Strip *strip, size_t first, uint8_t *codes, const uint16_t *x, size_t count,
                             Loss *loss, int kind, int step)
{
    uint16_t padded[LANES] = {0};
    uint8_t made[LANES];
    Words words[PARTS];
    Floats lost, all;
    memcpy(padded, x, 2 * count);
    for (int part = 0; part < PARTS; part++) {
        size_t at = FLOATS * part;
        Shares shares = step ? shares_at(strip, first + at, kind) : shares_of_all(strip, first, kind);
        words[part] = code_vector(&lost, &all, padded + at, shares, loss->by, kind, 1);
        for (size_t lane = at; lane < LEAST(count, at + FLOATS); lane++) {
            loss->lost[lane] += lost[lane - at];
            loss->all[lane] += all[lane - at];
        }
    }
    store_bytes(made, (const uint32_t *)words);
    memcpy(codes, made, count);
}

/* `encode_strip`, measured. Scales are those from `first` on (step 1), or that at `first` alone (step 0). */
TARGET ALWAYS void encode_measured(const Strip *strip, size_t first, uint8_t *codes, const uint16_t *x, size_t count,
                                   size_t ahead, Loss *loss, int kind, int step, int is_far)
{
    uint8_t single[STRIP], *made = kind == INT4 ? single : codes;
    Shares shares = shares_of_all(strip, first, kind);
    Floats lost_sums[PARTS], all_sums[PARTS], lost, all;
    Words words[PARTS];
    memcpy(lost_sums, loss->lost, sizeof lost_sums);
    memcpy(all_sums, loss->all, sizeof all_sums);
    float by = loss->by;
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        __builtin_prefetch(x + ahead + i);
        for (int part = 0; part < PARTS; part++) {
            size_t at = i + FLOATS * part;
            if (step)
                shares = shares_at(strip, first + at, kind);
            words[part] = code_vector(&lost, &all, x + at, shares, by, kind, is_far);
            lost_sums[part] += lost;
            all_sums[part] += all;
        }
        store_bytes(made + i, (const uint32_t *)words);
    }
    memcpy(loss->lost, lost_sums, sizeof lost_sums);
    memcpy(loss->all, all_sums, sizeof all_sums);
    if (i < count)
        code_last(strip, first + step * i, made + i, x + i, count - i, loss, kind, step);
    if (kind == INT4)
        pair_up(codes, single, count);
}

TARGET ALWAYS void encode_near(const Strip *strip, size_t first, uint8_t *codes, const uint16_t *x, size_t count,
                               size_t ahead, Loss *loss, int kind, int step)
{
    if (loss->by == 1.0f)
        encode_measured(strip, first, codes, x, count, ahead, loss, kind, step, 0);
    else
        encode_measured(strip, first, codes, x, count, ahead, loss, kind, step, 1);
}

/* Single precision to double. */
TARGET ALWAYS void gather(Loss *loss)
{
    double by = 1.0 / ((double)loss->by * (double)loss->by);
    for (int lane = 0; lane < LANES; lane++) {
        loss->lost_sums[lane] += (double)loss->lost[lane] * by;
        loss->all_sums[lane] += (double)loss->all[lane] * by;
        loss->lost[lane] = loss->all[lane] = 0.0f;
    }
}

#define NEAR_FROM 0x3000 /* bf16 of 2^-31 and of 2^33: squares of such numbers are numbers. */
#define NEAR_TO 0x5000

/* A power of two for magnitudes up to `largest`; 0 where one is not finite, or too large to come back. */
TARGET ALWAYS int begin_strip(Loss *loss, uint16_t largest)
{
    int is_near = largest >= NEAR_FROM && largest < NEAR_TO;
    loss->by = is_near ? 1.0f : float_of((254u - (largest >> 7)) << 23);
    return largest < TOO_LARGE;
}

/* A scale for each row. */
TARGET ALWAYS int pack_rows_measured(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x, Loss *loss,
                                     int kind)
{
    Strip strip;
    for (size_t top = 0; top < grid->rows; top += STRIP) {
        size_t rows = LEAST(STRIP, grid->rows - top);
        for (size_t row = 0; row < rows; row++)
            bound_row(&strip, row, x + (top + row) * grid->columns, grid->columns, kind);
        if (!begin_strip(loss, scale(&strip, scales + top, scales + grid->rows + top, rows, kind)))
            return 0;
        for (size_t row = 0; row < rows; row++) {
            for (size_t left = 0; left < grid->columns; left += STRIP) {
                size_t at = (top + row) * grid->columns + left, count = LEAST(STRIP, grid->columns - left);
                encode_near(&strip, row, codes + CODES(at), x + at, count, grid->rows * grid->columns, loss, kind, 0);
            }
            if (row % SINGLE_ROWS == SINGLE_ROWS - 1 || row == rows - 1)
                gather(loss);
        }
    }
    return 1;
}

/* A scale for each column. */
TARGET ALWAYS int pack_columns_measured(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x,
                                        Loss *loss, int kind)
{
    Strip strip;
    for (size_t left = 0; left < grid->columns; left += STRIP) {
        size_t wide = LEAST(STRIP, grid->columns - left);
        unbound(&strip, wide);
        for (size_t row = 0; row < grid->rows; row++)
            bound_each(&strip, x + row * grid->columns + left, wide, kind);
        if (!begin_strip(loss, scale(&strip, scales + left, scales + grid->columns + left, wide, kind)))
            return 0;
        for (size_t row = 0; row < grid->rows; row++) {
            size_t at = row * grid->columns + left;
            encode_near(&strip, 0, codes + CODES(at), x + at, wide, grid->rows * grid->columns, loss, kind, 1);
            if (row % SINGLE_ROWS == SINGLE_ROWS - 1 || row == grid->rows - 1)
                gather(loss);
        }
    }
    return 1;
}

TARGET ALWAYS double sum_of_lanes(const double *lanes)
{
    double sum = 0.0;
    for (int lane = 0; lane < LANES; lane++)
        sum += lanes[lane];
    return sum;
}

TARGET ALWAYS double error_of(const Loss *loss)
{
    double lost = sum_of_lanes(loss->lost_sums);
    return lost == 0.0 ? 0.0 : __builtin_sqrt(lost / sum_of_lanes(loss->all_sums));
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
