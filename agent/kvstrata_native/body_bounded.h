/* Packing that bounds what it loses, without looking at what codes come back as; part of body.h.

   What codes lose is summed in steps of the codes, and times a step's square only for a row or column. What is rounded
   to bf16 afterwards moves by at most half of its last bit. So the error of a plane is known to about 0.4 % of the
   plane, for half of the work: enough, but where the limit lies in between. Such planes are measured (body_measured.h).
   What rounding does to e4m3 depends on three bits of a code: it is looked up, where a level can, and then all but the
   sums is exact. Which form a plane gets is the same at every level for that reason, though sums are rounded as each level likes. */

#define SUMMED_MOST 0x1p-15 /* Of ||x'||: what sums in single precision are off by. */
#define ROUNDED_MOST (0x1p-8 + SUMMED_MOST) /* And half of bf16's last bit. */
#define BOUNDED_ROWS 64 /* Of so many rows at most squares are added in single precision. */

/* Sums of squares of a plane: of what codes lose, and of all there is. */
typedef struct {
    double lost, all;
} Squares;

typedef struct {
    double least, most; /* Of ||x - x'|| / ||x||. */
} Bounds;

#ifdef HAS_EIGHTS
#define IS_ROUNDED(kind) ((kind) != FP8)
#else
#define IS_ROUNDED(kind) ((void)(kind), 1)
#endif

TARGET ALWAYS double unknown_of(double error, int kind)
{
    return (IS_ROUNDED(kind) ? ROUNDED_MOST : SUMMED_MOST) * (1.0 + error);
}

TARGET ALWAYS Bounds bounds_of(const Squares *squares, int kind)
{
    double error = squares->lost == 0.0 ? 0.0 : __builtin_sqrt(squares->lost / squares->all);
    double unknown = unknown_of(error, kind);
    return (Bounds){error - unknown, error + unknown};
}

TARGET ALWAYS double sum_of_floats(Floats values)
{
    float lanes[FLOATS];
    double sum = 0.0;
    memcpy(lanes, &values, sizeof lanes);
    for (int lane = 0; lane < FLOATS; lane++)
        sum += (double)lanes[lane];
    return sum;
}

TARGET ALWAYS void add_squares(Squares *squares, Floats lost, Floats all)
{
    squares->lost += sum_of_floats(lost);
    squares->all += sum_of_floats(all);
}

TARGET ALWAYS Floats squared(Floats steps) { return steps * steps; }

TARGET ALWAYS Floats with_square(Floats sum, Floats values) { return (Floats)add_product(sum, values, values); }

#ifdef HAS_EIGHTS
/* What a code of e4m3 loses, in steps, once it came back. */
TARGET ALWAYS Floats off_rounded(Coded coded, Shares shares)
{
    Floats moved = (Floats)looked_up_eighth(shares.table[0], (Vector)((Words)coded.step >> 20));
    return (Floats)add_product(coded.off, coded.step, moved);
}
#endif

/* Codes of LANES elements; `lost` in steps of the codes, for each vector of them. */
TARGET ALWAYS void code_bounded(uint8_t *codes, const uint16_t *x, Shares shares[PARTS][2], Floats lost[PARTS][2],
                                Floats all[2], int kind)
{
    Coding coding;
    for (int part = 0; part < PARTS; part++) {
        Words chunk = coding.chunks[part] = chunk_at(x + CHUNK * part);
        for (int odd = 0; odd < 2; odd++) {
            Floats was = half_of(kind == FP8 ? chunk & 0x7FFF7FFF : chunk, odd);
            Coded coded = coded_of(was, shares[part][odd], kind);
#ifdef HAS_EIGHTS
            if (kind == FP8)
                coded.off = off_rounded(coded, shares[part][odd]);
#endif
            lost[part][odd] = with_square(lost[part][odd], coded.off);
            all[odd] = with_square(all[odd], was);
            coding.codes[odd][part] = coded.code;
        }
    }
    store_coding(codes, &coding, kind);
}

/* Each column of a plane with a scale of its own. */
TARGET ALWAYS void encode_columns_bounded(const Grid *grid, uint8_t *codes, const uint16_t *x, const Split *split,
                                          Squares *squares, int kind)
{
    size_t rows = grid->rows, columns = grid->columns;
    for (size_t left = 0; left < columns; left += LANES) {
        Shares shares[PARTS][2];
        for (int part = 0; part < PARTS; part++)
            for (int odd = 0; odd < 2; odd++)
                shares[part][odd] = shares_at(split, left + (size_t)(CHUNK * part + FLOATS * odd), kind);
        for (size_t top = 0; top < rows; top += BOUNDED_ROWS) {
            Floats lost[PARTS][2] = {{{0}}}, all[2] = {{0}}, sum = {0};
            for (size_t row = top; row < LEAST(rows, top + BOUNDED_ROWS); row++) {
                size_t at = row * columns + left;
                __builtin_prefetch(x + rows * columns + at);
                code_bounded(codes + CODES(at), x + at, shares, lost, all, kind);
            }
            for (int part = 0; part < PARTS; part++)
                for (int odd = 0; odd < 2; odd++)
                    sum += lost[part][odd] * squared(shares[part][odd].by);
            add_squares(squares, sum, all[0] + all[1]);
        }
    }
}

/* Rows of a strip, each with a scale of its own. */
TARGET ALWAYS void encode_rows_bounded(const Grid *grid, uint8_t *codes, const uint16_t *x, const Split *split,
                                       size_t rows, size_t columns, Squares *squares, int kind)
{
    Floats all[2] = {{0}}, sum = {0};
    for (size_t row = 0; row < rows; row++) {
        Floats lost[PARTS][2] = {{{0}}}, of_row = {0};
        Shares shares[PARTS][2], own = shares_of_all(split, row, kind);
#ifdef HAS_EIGHTS
        if (kind == FP8)
            own = with_eighths(own);
#endif
        for (int part = 0; part < PARTS; part++)
            shares[part][0] = shares[part][1] = own;
        for (size_t at = row * columns; at < (row + 1) * columns; at += LANES) {
            __builtin_prefetch(x + grid->rows * columns + at);
            code_bounded(codes + CODES(at), x + at, shares, lost, all, kind);
        }
        for (int part = 0; part < PARTS; part++)
            of_row += lost[part][0] + lost[part][1];
        sum += of_row * squared(shares[0][0].by);
        if (row % SINGLE_ROWS == SINGLE_ROWS - 1 || row == rows - 1) {
            add_squares(squares, sum, all[0] + all[1]);
            sum = all[0] = all[1] = (Floats){0};
        }
    }
}

/* As `pack` of a plane whose groups are its rows or its columns; 0 where a number is not near 1. */
TARGET ALWAYS int pack_kind_bounded(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x,
                                    size_t columns, Squares *squares, int kind, int is_by_column)
{
    Strip strip;
    Split split;
    if (is_by_column) {
        for (size_t left = 0; left < columns; left += CHUNK)
            bound_chunk(&strip, left, x, grid->rows, columns, kind);
        if (!is_near(scale(&split, &strip, scales, scales + columns, columns, kind)))
            return 0;
        encode_columns_bounded(grid, codes, x, &split, squares, kind);
        return 1;
    }
    for (size_t top = 0; top < grid->rows; top += STRIP) {
        size_t rows = LEAST(STRIP, grid->rows - top), at = top * columns;
        for (size_t row = 0; row < rows; row++)
            bound_row(&strip, row, x + at + row * columns, columns, kind);
        if (!is_near(scale(&split, &strip, scales + top, scales + grid->rows + top, rows, kind)))
            return 0;
        encode_rows_bounded(grid, codes + CODES(at), x + at, &split, rows, columns, squares, kind);
    }
    return 1;
}

TARGET ALWAYS int pack_columns_bounded(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x,
                                       size_t columns, Squares *squares)
{
    switch (grid->kind * 2 + grid->is_by_column) {
    case FP8 * 2: return pack_kind_bounded(grid, codes, scales, x, columns, squares, FP8, 0);
    case INT8 * 2: return pack_kind_bounded(grid, codes, scales, x, columns, squares, INT8, 0);
    case INT8 * 2 + 1: return pack_kind_bounded(grid, codes, scales, x, columns, squares, INT8, 1);
    case INT4 * 2: return pack_kind_bounded(grid, codes, scales, x, columns, squares, INT4, 0);
    case INT4 * 2 + 1: return pack_kind_bounded(grid, codes, scales, x, columns, squares, INT4, 1);
    }
    return 0;
}

/* `pack` of a plane, and between what its error lies; 0 where nothing is known of it. */
TARGET static int pack_bounded(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x, Bounds *bounds)
{
    Squares squares = {0};
    int is_packed = grid->columns == 128 ? pack_columns_bounded(grid, codes, scales, x, 128, &squares)
                    : grid->columns % LANES == 0 && grid->columns <= STRIP
                        ? pack_columns_bounded(grid, codes, scales, x, grid->columns, &squares)
                        : 0;
    *bounds = bounds_of(&squares, grid->kind);
    return is_packed;
}
