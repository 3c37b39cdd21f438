/* Blocks whose planes are stored in different forms; part of body.h. `forms.py` says what they are, `python.py`
   is the oracle: equal to the bit, errors included. */

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

/* Pack a plane on a rung and measure it; how long it is, or 0 where it cannot be, or becomes no shorter. */
TARGET ALWAYS size_t pack_on(int rung, uint8_t *into, const uint16_t *x, const Mixing *mixing, double *error)
{
    size_t bytes = 2 * mixing->rows * mixing->columns;
    if (rung >= ROTATED_4) {
        Rotation rotation = rotation_of(rung, mixing);
        size_t size = rotation_bytes(&rotation);
        if (rotation.run == 0 || size >= bytes)
            return 0;
        return pack_rotated(&rotation, into + 4 * mixing->rows, (uint16_t *)into, x, error) ? size : 0;
    }
    Grid grid = grid_of_rung(rung, mixing);
    if (grid_bytes(&grid) >= bytes)
        return 0;
    return pack_measured(&grid, into + scales_bytes(&grid), (uint16_t *)into, x, error) ? grid_bytes(&grid) : 0;
}

TARGET static size_t mix_plane(uint8_t *into, const uint16_t *x, const Mixing *mixing, uint8_t *rung, double *error)
{
    size_t bytes = 2 * mixing->rows * mixing->columns;
    for (; !is_exact(*rung); *rung = after[mixing->is_rotated][*rung]) {
        size_t size = pack_on(*rung, into, x, mixing, error);
        if (size > 0 && *error <= mixing->limit)
            return size;
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
    for (size_t plane = 0; plane < mixing->planes; plane++, head += HEAD_BYTES) {
        size_t size = mix_plane(body, source, mixing, rungs + plane, errors + plane);
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
