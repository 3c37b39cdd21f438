/* Blocks whose planes are stored in different forms; part of body.h. `forms.py` says what they are, `python.py`
   is the oracle: stored bytes are equal to the bit, and so are errors that are measured. */

ALWAYS Grid grid_of_rung(int rung, const Mixing *mixing)
{
    static const int kinds[] = {INT4, INT4, FP8, INT8, INT8};
    int is_by_column = rung == INT4_COLUMN || rung == INT8_COLUMN;
    return (Grid){.kind = kinds[rung], .is_by_column = is_by_column, .rows = mixing->rows, .columns = mixing->columns,
                  .group = is_by_column ? mixing->rows : mixing->columns};
}

ALWAYS size_t scales_bytes(const Grid *grid)
{
    return (grid->is_by_column ? grid->columns : grid->rows) * (grid->kind == INT4 ? 4 : 2);
}

ALWAYS size_t grid_bytes(const Grid *grid)
{
    return scales_bytes(grid) + grid->rows * grid->columns / (grid->kind == INT4 ? 2 : 1);
}

/* A plane on a rung that is no grid; `run` is 0 where there is no such plane. */
ALWAYS Rotation rotation_of(int rung, const Mixing *mixing)
{
    static const int bits[] = {4, 5, 6, 8};
    size_t run = mixing->columns & -mixing->columns; /* The largest power of two that divides it. */
    int is_there = run >= RUN_LEAST && mixing->columns <= RUN_MOST;
    return (Rotation){.bits = bits[rung - ROTATED_4], .rows = mixing->rows, .columns = mixing->columns,
                      .run = is_there ? run : 0};
}

ALWAYS size_t rotation_bytes(const Rotation *rotation)
{
    return 4 * rotation->rows + rotation->rows * rotation->columns * (size_t)rotation->bits / 8;
}

/* The ladder: what is tried next, in the order of forms; without rotated planes, and with them. */
static const uint8_t after[2][RUNGS] = {
    {INT4_COLUMN, INT8_ROW, INT8_COLUMN, FP8_ROW, EXACT, EXACT, EXACT, INT4_COLUMN, INT4_COLUMN, INT8_ROW, INT8_COLUMN},
    {ROTATED_4, ROTATED_6, ROTATED_8, FP8_ROW, EXACT, EXACT, EXACT, ROTATED_5, INT4_COLUMN, INT8_ROW, INT8_COLUMN},
};

ALWAYS int is_exact(int rung) { return rung == EXACT || rung == AS_IT_IS || rung >= RUNGS; }

/* How a plane is packed on a rung; `size` is 0 where it cannot be, or becomes no shorter. */
typedef struct {
    int is_rotated;
    Rotation rotation;
    Grid grid;
    size_t size, scales;
} Form;

ALWAYS Form form_of(int rung, const Mixing *mixing)
{
    Form form = {.is_rotated = rung >= ROTATED_4, .grid.kind = INT4, .scales = 4 * mixing->rows};
    if (form.is_rotated) {
        form.rotation = rotation_of(rung, mixing);
        form.size = form.rotation.run == 0 ? 0 : rotation_bytes(&form.rotation);
    } else {
        form.grid = grid_of_rung(rung, mixing);
        form.size = grid_bytes(&form.grid), form.scales = scales_bytes(&form.grid);
    }
    if (form.size >= 2 * mixing->rows * mixing->columns)
        form.size = 0;
    return form;
}

/* Whether a plane is packed on a rung with an error within the limit. It is measured where bounds do not tell, and
   where they did not for the last plane on that rung, which is `doubtful` then; and where any error is permitted, for
   then it is the error that is asked for. */
TARGET ALWAYS int is_packed_on(const Form *form, unsigned rung, uint8_t *into, const uint16_t *x, const Mixing *mixing,
                               double *error, unsigned *doubtful)
{
    uint16_t *scales = (uint16_t *)into;
    uint8_t *codes = into + form->scales;
    if (!(*doubtful >> rung & 1) && mixing->limit < __builtin_inf()) {
        Bounds bounds;
        int is_bounded = form->is_rotated ? rotate_bounded(&form->rotation, codes, scales, x, &bounds)
                                          : pack_bounded(&form->grid, codes, scales, x, &bounds);
        *error = bounds.most;
        if (is_bounded && (bounds.most <= mixing->limit || bounds.least > mixing->limit))
            return bounds.most <= mixing->limit;
    }
    int is_packed = form->is_rotated ? pack_rotated(&form->rotation, codes, scales, x, error)
                                     : pack_measured(&form->grid, codes, scales, x, error);
    int is_close = is_packed && __builtin_fabs(*error - mixing->limit) <= unknown_of(*error, form->grid.kind);
    *doubtful = (*doubtful & ~(1u << rung)) | (unsigned)is_close << rung;
    return is_packed && *error <= mixing->limit;
}

TARGET static size_t mix_plane(uint8_t *into, const uint16_t *x, const Mixing *mixing, uint8_t *rung, double *error,
                               unsigned *doubtful)
{
    size_t bytes = 2 * mixing->rows * mixing->columns;
    for (; !is_exact(*rung); *rung = after[mixing->is_rotated][*rung]) {
        Form form = form_of(*rung, mixing);
        if (form.size > 0 && is_packed_on(&form, *rung, into, x, mixing, error, doubtful))
            return form.size;
    }
    *rung = EXACT, *error = 0.0;
    size_t size = narrow(into, (const uint8_t *)x, bytes, 2, mixing->width);
    if (size < bytes)
        return size;
    *rung = AS_IT_IS;
    memcpy(into, x, bytes);
    return bytes;
}

TARGET static size_t mix(uint8_t *into, const uint16_t *source, const Mixing *mixing, uint8_t *rungs, double *errors)
{
    uint8_t *head = into, *body = into + HEAD_BYTES * mixing->planes;
    unsigned doubtful = 0;
    for (size_t plane = 0; plane < mixing->planes; plane++, head += HEAD_BYTES) {
        size_t size = mix_plane(body, source, mixing, rungs + plane, errors + plane, &doubtful);
        uint32_t word = (uint32_t)size | (uint32_t)rungs[plane] << 24;
        memcpy(head, &word, sizeof word);
        source += mixing->rows * mixing->columns;
        body += size;
        if (size % 2 != 0)
            *body++ = 0;
    }
    return (size_t)(body - into);
}

TARGET static int unmix_plane(uint16_t *x, const Mixing *mixing, int rung, const uint8_t *body, size_t size)
{
    size_t bytes = 2 * mixing->rows * mixing->columns;
    if (rung == EXACT)
        return widen((uint8_t *)x, bytes, body, size, 2, mixing->width);
    if (rung == AS_IT_IS && size == bytes) {
        memcpy(x, body, bytes);
        return 1;
    }
    if (is_exact(rung))
        return 0;
    if (rung >= ROTATED_4) {
        Rotation rotation = rotation_of(rung, mixing);
        if (rotation.run == 0 || size != rotation_bytes(&rotation))
            return 0;
        return unpack_rotated(&rotation, x, body + 4 * mixing->rows, (const uint16_t *)body);
    }
    Grid grid = grid_of_rung(rung, mixing);
    if (size != grid_bytes(&grid))
        return 0;
    unpack(&grid, x, body + scales_bytes(&grid), (const uint16_t *)body);
    return 1;
}

TARGET static int unmix(uint16_t *into, const uint8_t *stored, size_t stored_bytes, const Mixing *mixing)
{
    if (stored_bytes < HEAD_BYTES * mixing->planes)
        return 0;
    const uint8_t *head = stored, *body = stored + HEAD_BYTES * mixing->planes;
    size_t left = stored_bytes - HEAD_BYTES * mixing->planes;
    for (size_t plane = 0; plane < mixing->planes; plane++, head += HEAD_BYTES) {
        uint32_t word;
        memcpy(&word, head, sizeof word);
        size_t size = word & 0xFFFFFF, padded = size + size % 2;
        if (padded > left || !unmix_plane(into, mixing, (int)(word >> 24), body, size))
            return 0;
        into += mixing->rows * mixing->columns;
        body += padded, left -= padded;
    }
    return left == 0;
}
