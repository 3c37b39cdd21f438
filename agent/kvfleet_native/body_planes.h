/* Exponent planes of floating-point numbers; part of body.h. What they are is said in kvfleet_agent/codec/planes.py. */

TARGET static void split(uint8_t *restrict top, uint8_t *restrict rest, const uint8_t *restrict source, size_t count,
                         int element_bytes)
{
    if (element_bytes == 2) {
        for (size_t i = 0; i < count; i++) {
            uint16_t word;
            memcpy(&word, source + 2 * i, sizeof word);
            word = (uint16_t)(word << 1 | word >> 15);
            top[i] = (uint8_t)(word >> 8);
            rest[i] = (uint8_t)word;
        }
        return;
    }
    for (size_t i = 0; i < count; i++) {
        uint32_t word;
        memcpy(&word, source + 4 * i, sizeof word);
        word = word << 1 | word >> 31;
        top[i] = (uint8_t)(word >> 24);
        memcpy(rest + 3 * i, &word, 3);
    }
}

TARGET static void join(uint8_t *restrict into, const uint8_t *restrict top, const uint8_t *restrict rest, size_t count,
                        int element_bytes)
{
    if (element_bytes == 2) {
        for (size_t i = 0; i < count; i++) {
            uint16_t word = (uint16_t)(top[i] << 8 | rest[i]);
            word = (uint16_t)(word >> 1 | word << 15);
            memcpy(into + 2 * i, &word, sizeof word);
        }
        return;
    }
    for (size_t i = 0; i < count; i++) {
        const uint8_t *low = rest + 3 * i;
        uint32_t word = (uint32_t)top[i] << 24 | (uint32_t)low[2] << 16 | (uint32_t)low[1] << 8 | low[0];
        word = word >> 1 | word << 31;
        memcpy(into + 4 * i, &word, sizeof word);
    }
}
