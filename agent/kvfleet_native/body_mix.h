/* Blocks whose planes are stored in different forms; part of body.h. `mixing.py` says what they are, `python_mixing.py`
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

/* The ladder: what is tried next, in the order of forms. */
static const uint8_t after[EXACT] = {INT4_COLUMN, INT8_ROW, INT8_COLUMN, FP8_ROW, EXACT};

TARGET static size_t mix_plane(uint8_t *into, const uint16_t *x, const Mixing *mixing, uint8_t *rung, double *error)
{
    size_t count = mixing->rows * mixing->columns, bytes = 2 * count;
    for (; *rung < EXACT; *rung = after[*rung]) {
        Grid grid = grid_of_rung(*rung, mixing);
        if (grid_bytes(&grid) >= bytes)
            continue;
        if (!pack_measured(&grid, into + scales_bytes(&grid), (uint16_t *)into, x, error))
            break;
        if (*error <= mixing->limit)
            return grid_bytes(&grid);
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
    if (rung >= EXACT)
        return 0;
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
