/* Packing, and packing that measures what it loses, in one pass over numbers that lie in a cache since their bounds
   were found; part of body.h. Errors are sums of squares in lanes whose order is fixed, in single precision over
   a few rows and in double precision over these: equal to the bit at every level (`python.py`). Numbers are brought
   below 2 by a power of two before they are squared, so nothing overflows, and what underflows is nothing beside them. */

enum { UNMEASURED, NEAR, FAR }; /* How errors are measured: squares as they are, or times by^2. */
#define BATCH 8192 /* Elements whose bounds are found before they are coded: half of the smallest first cache. */
#define SINGLE_ROWS 16 /* Of so many rows at most squares are added in single precision. */

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

TARGET ALWAYS void add_loss(Floats *lost, Floats *all, Floats was, Floats came, float by, int how)
{
    Floats difference = was - came;
    if (how == FAR)
        difference *= by, was *= by;
    *lost += difference * difference;
    *all += was * was;
}

/* Codes of half a chunk, and the squares of what they lose and are. */
TARGET ALWAYS Words code_half(Floats *lost, Floats *all, Floats was, Shares shares, float by, int kind, int how,
                              int is_tabled)
{
    Coded coded = coded_of(was, shares, kind);
    if (how != UNMEASURED)
        add_loss(lost, all, was, came_back(coded, shares, kind, is_tabled), by, how);
    return coded.code;
}

/* Codes of `part` of LANES elements, into their places. */
TARGET ALWAYS void code_chunk(Coding *coding, int part, const uint16_t *x, Floats *lost, Floats *all,
                              const Shares *shares, float by, int kind, int how, int is_tabled)
{
    Words chunk = chunk_at(x), valued = kind == FP8 ? chunk & 0x7FFF7FFF : chunk;
    coding->chunks[part] = chunk;
    for (int odd = 0; odd < 2; odd++)
        coding->codes[odd][part] =
            code_half(lost + odd, all + odd, half_of(valued, odd), shares[odd], by, kind, how, is_tabled);
}

/* The last elements of a row, fewer than LANES; scales of `split` are those from `first` on. */
TARGET ALWAYS void code_last(uint8_t *codes, const uint16_t *x, size_t count, Sums *sums, const Split *split,
                             size_t first, const Shares *fixed, float by, int kind, int how)
{
    uint16_t padded[LANES] = {0};
    uint8_t made[LANES];
    Coding coding;
    memcpy(padded, x, 2 * count);
    for (int part = 0; part < PARTS; part++) {
        size_t at = (size_t)(CHUNK * part);
        Floats lost[2] = {{0}}, all[2] = {{0}};
        Shares shares[2] = {fixed[0], fixed[1]};
        if (split != NULL)
            shares[0] = shares_at(split, first + at, kind), shares[1] = shares_at(split, first + at + FLOATS, kind);
        code_chunk(&coding, part, padded + at, lost, all, shares, by, kind, how == NEAR ? FAR : how, 0);
        for (size_t i = at; how != UNMEASURED && i < LEAST(count, at + CHUNK); i++) {
            sums->lost[part][i % 2][(i - at) / 2] += lost[i % 2][(i - at) / 2];
            sums->all[part][i % 2][(i - at) / 2] += all[i % 2][(i - at) / 2];
        }
    }
    store_coding(made, &coding, kind);
    memcpy(codes, made, CODES(count));
}

/* Codes of a row. Scales are those of `split` where it is given, else `fixed` for all. */
TARGET ALWAYS void encode(uint8_t *codes, const uint16_t *x, size_t count, size_t ahead, Sums *sums, const Split *split,
                          const Shares *fixed, float by, int kind, int how)
{
    Shares shares[2] = {fixed[0], fixed[1]};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        Coding coding;
        __builtin_prefetch(x + ahead + i);
        for (int part = 0; part < PARTS; part++) {
            size_t at = i + (size_t)(CHUNK * part);
            if (split != NULL)
                shares[0] = shares_at(split, at, kind), shares[1] = shares_at(split, at + FLOATS, kind);
            code_chunk(&coding, part, x + at, sums->lost[part], sums->all[part], shares, by, kind, how,
                       split == NULL && how == NEAR);
        }
        store_coding(codes + CODES(i), &coding, kind);
    }
    if (i < count)
        code_last(codes + CODES(i), x + i, count - i, sums, split, i, fixed, by, kind, how);
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

ALWAYS int is_near(uint16_t largest) { return largest >= NEAR_FROM && largest < NEAR_TO; }

/* A power of two for magnitudes up to `largest`; 0 where one is not finite, or too large to come back. */
TARGET ALWAYS int begin_strip(Loss *loss, uint16_t largest)
{
    loss->by = is_near(largest) ? 1.0f : float_of((254u - (largest >> 7)) << 23);
    loss->inverse = 1.0 / ((double)loss->by * (double)loss->by);
    return largest < TOO_LARGE;
}

/* Rows of a strip, each with a scale of its own. */
TARGET ALWAYS void encode_rows(uint8_t *codes, const uint16_t *x, const Split *split, size_t rows, size_t columns,
                               Loss *loss, int kind, int how)
{
    Sums sums = {0};
    Shares next = with_table(shares_of_all(split, 0, kind), kind); /* Made while the row before is coded. */
    for (size_t row = 0; row < rows; row++) {
        Shares fixed[2] = {next, next};
        next = with_table(shares_of_all(split, LEAST(row + 1, rows - 1), kind), kind);
        for (size_t left = 0; left < columns; left += STRIP) {
            size_t at = row * columns + left, count = LEAST(STRIP, columns - left);
            encode(codes + CODES(at), x + at, count, rows * columns, &sums, NULL, fixed, loss->by, kind, how);
        }
        if (how != UNMEASURED)
            gather(loss, &sums, row, rows);
    }
}

/* One scale for `group` elements that lie beside each other. Only whole strips are measured alike at every level. */
TARGET ALWAYS int pack_runs(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x, size_t columns,
                            Loss *loss, int kind, int is_measured)
{
    Strip strip;
    Split split;
    size_t groups = grid->rows * grid->columns / columns;
    size_t most = is_measured ? STRIP : LEAST(STRIP, BATCH / columns + 1);
    for (size_t top = 0; top < groups; top += most) {
        size_t rows = LEAST(most, groups - top), at = top * columns;
        for (size_t row = 0; row < rows; row++)
            bound_row(&strip, row, x + at + row * columns, columns, kind);
        if (!begin_strip(loss, scale(&split, &strip, scales + top, scales + groups + top, rows, kind)))
            return 0;
        if (!is_measured)
            encode_rows(codes + CODES(at), x + at, &split, rows, columns, loss, kind, UNMEASURED);
        else if (loss->by == 1.0f)
            encode_rows(codes + CODES(at), x + at, &split, rows, columns, loss, kind, NEAR);
        else
            encode_rows(codes + CODES(at), x + at, &split, rows, columns, loss, kind, FAR);
    }
    return 1;
}

/* Most heads have 128 channels: loops over so many are made without any counting. */
TARGET ALWAYS int pack_rows(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x, Loss *loss, int kind,
                            int is_measured)
{
    if (grid->group == 128)
        return pack_runs(grid, codes, scales, x, 128, loss, kind, is_measured);
    return pack_runs(grid, codes, scales, x, grid->group, loss, kind, is_measured);
}

/* Columns of a strip, each with a scale of its own. */
TARGET ALWAYS void encode_columns(const Grid *grid, uint8_t *codes, const uint16_t *x, const Split *split, size_t rows,
                                  size_t wide, Loss *loss, int kind, int how)
{
    Shares none[2] = {0};
    Sums sums = {0};
    for (size_t row = 0; row < rows; row++) {
        size_t at = row * grid->columns;
        encode(codes + CODES(at), x + at, wide, rows * grid->columns, &sums, split, none, loss->by, kind, how);
        if (how != UNMEASURED)
            gather(loss, &sums, row, rows);
    }
}

/* One scale for up to `group` elements that lie below each other. */
TARGET ALWAYS int pack_columns(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x, Loss *loss,
                               int kind, int is_measured)
{
    Strip strip;
    Split split;
    size_t columns = grid->columns, count = bands_of(grid) * columns;
    for (size_t top = 0; top < grid->rows; top += grid->group, scales += columns) {
        size_t rows = LEAST(grid->group, grid->rows - top);
        for (size_t left = 0; left < columns; left += STRIP) {
            size_t wide = LEAST(STRIP, columns - left), at = top * columns + left;
            bound_columns(&strip, x + at, rows, columns, wide, kind);
            if (!begin_strip(loss, scale(&split, &strip, scales + left, scales + count + left, wide, kind)))
                return 0;
            if (!is_measured)
                encode_columns(grid, codes + CODES(at), x + at, &split, rows, wide, loss, kind, UNMEASURED);
            else if (loss->by == 1.0f)
                encode_columns(grid, codes + CODES(at), x + at, &split, rows, wide, loss, kind, NEAR);
            else
                encode_columns(grid, codes + CODES(at), x + at, &split, rows, wide, loss, kind, FAR);
        }
    }
    return 1;
}

TARGET ALWAYS int pack_any(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x, Loss *loss,
                           int is_measured)
{
    switch (grid->kind * 2 + grid->is_by_column) {
    case FP8 * 2: return pack_rows(grid, codes, scales, x, loss, FP8, is_measured);
    case FP8 * 2 + 1: return pack_columns(grid, codes, scales, x, loss, FP8, is_measured);
    case INT8 * 2: return pack_rows(grid, codes, scales, x, loss, INT8, is_measured);
    case INT8 * 2 + 1: return pack_columns(grid, codes, scales, x, loss, INT8, is_measured);
    case INT4 * 2: return pack_rows(grid, codes, scales, x, loss, INT4, is_measured);
    case INT4 * 2 + 1: return pack_columns(grid, codes, scales, x, loss, INT4, is_measured);
    }
    return 0;
}

TARGET static int pack(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x)
{
    Loss loss = {.by = 1.0f};
    return pack_any(grid, codes, scales, x, &loss, 0);
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
    int is_packed = pack_any(grid, codes, scales, x, &loss, 1);
    *error = error_of(&loss);
    return is_packed;
}
