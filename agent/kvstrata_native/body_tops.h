/* Top bytes of elements in fewer bits, and back; part of body.h. `forms.py` says what is stored, `python_forms.py` is the
   oracle: both make the same choices, so results are equal to the bit. */

#define ROWS 8          /* Of a strip: codes of one bit position in all rows are shifted alike. */
#define ROW_BYTES (STRIP_BYTES / ROWS)
#define WORDS (STRIP_BYTES / 64)
#define WIDER 128       /* In a strip's second byte: its codes are one bit wider. */
#define UNCODED 255
#define SAMPLED_STRIPS 8

/* Elements rotated left by one bit: their top bytes, and all others in rows, the lowest first. */
TARGET ALWAYS void take_strip(uint8_t *restrict top, uint8_t *restrict rest, const uint8_t *restrict source,
                              int element_bytes)
{
    if (element_bytes == 2) {
#ifdef HAS_BYTES
        for (size_t i = 0; i < STRIP_BYTES; i += 64)
            split_words(top + i, rest + i, source + 2 * i);
        return;
#endif
        for (size_t i = 0; i < STRIP_BYTES; i++) {
            uint16_t word;
            memcpy(&word, source + 2 * i, sizeof word);
            word = (uint16_t)(word << 1 | word >> 15);
            top[i] = (uint8_t)(word >> 8);
            rest[i] = (uint8_t)word;
        }
    } else if (element_bytes == 4) {
        for (size_t i = 0; i < STRIP_BYTES; i++) {
            uint32_t word;
            memcpy(&word, source + 4 * i, sizeof word);
            word = word << 1 | word >> 31;
            top[i] = (uint8_t)(word >> 24);
            rest[i] = (uint8_t)word;
            rest[STRIP_BYTES + i] = (uint8_t)(word >> 8);
            rest[2 * STRIP_BYTES + i] = (uint8_t)(word >> 16);
        }
    } else {
        for (size_t i = 0; i < STRIP_BYTES; i++)
            top[i] = (uint8_t)(source[i] << 1 | source[i] >> 7);
    }
}

TARGET ALWAYS void put_strip(uint8_t *restrict into, const uint8_t *restrict top, const uint8_t *restrict rest,
                             int element_bytes)
{
    if (element_bytes == 2) {
        for (size_t i = 0; i < STRIP_BYTES; i++) {
            uint16_t word = (uint16_t)(top[i] << 8 | rest[i]);
            word = (uint16_t)(word >> 1 | word << 15);
            memcpy(into + 2 * i, &word, sizeof word);
        }
    } else if (element_bytes == 4) {
        for (size_t i = 0; i < STRIP_BYTES; i++) {
            uint32_t word = (uint32_t)top[i] << 24 | (uint32_t)rest[2 * STRIP_BYTES + i] << 16 |
                            (uint32_t)rest[STRIP_BYTES + i] << 8 | rest[i];
            word = word >> 1 | word << 31;
            memcpy(into + 4 * i, &word, sizeof word);
        }
    } else {
        for (size_t i = 0; i < STRIP_BYTES; i++)
            into[i] = (uint8_t)(top[i] >> 1 | top[i] << 7);
    }
}

/* Which of a strip's top bytes lie outside of the 2^width values that end at a base, and how many. */
typedef struct {
    uint64_t words[WORDS];
    int count;
    uint8_t base;
} Outside;

TARGET ALWAYS Outside outside_of(const uint8_t *top, uint8_t base, int width)
{
    Outside found = {.base = base};
    for (int i = 0; i < WORDS; i++) {
        found.words[i] = far_below(top + 64 * i, base, (uint8_t)(1 << width));
        found.count += __builtin_popcountll(found.words[i]);
    }
    return found;
}

/* The better one of two bases: two or three eighths of the values lie above the mean of the strip. Nobody could foretell
   which it is, so there is no branch. */
TARGET ALWAYS Outside best_base(const uint8_t *top, unsigned mean, int width)
{
    unsigned step = 1u << width >> 3;
    int low = outside_of(top, (uint8_t)(mean + 2 * step), width).count;
    int high = outside_of(top, (uint8_t)(mean + 3 * step), width).count;
    return outside_of(top, (uint8_t)(mean + (2 + (unsigned)(high < low)) * step), width);
}

TARGET ALWAYS unsigned mean_of(const uint8_t *top) { return (sum_of(top) + STRIP_BYTES / 2) / STRIP_BYTES; }

ALWAYS size_t coded_bytes(int width, int count) { return (size_t)(ROW_BYTES * width + 2 * count); }

typedef uint8_t Row __attribute__((vector_size(ROW_BYTES)));

/* Distances below the base, as many bits of each as a code has, row by row into `width` rows of bytes. */
TARGET ALWAYS void press(uint8_t *into, const uint8_t *top, uint8_t base, int width)
{
    Row rows[ROWS];
    memcpy(rows, top, sizeof rows);
    for (int row = 0; row < ROWS; row++)
        rows[row] = (base - rows[row]) & (uint8_t)((1 << width) - 1);
    for (int out = 0; out < width; out++) {
        Row bytes = {0};
        for (int row = 0; row < ROWS; row++) {
            int at = row * width - 8 * out;
            if (at > -width && at < 8)
                bytes |= at >= 0 ? rows[row] << at : rows[row] >> -at;
        }
        memcpy(into + ROW_BYTES * out, &bytes, sizeof bytes);
    }
}

TARGET ALWAYS void unpress(uint8_t *top, const uint8_t *codes, uint8_t base, int width)
{
    for (int row = 0; row < ROWS; row++) {
        Row low, high;
        int at = row * width % 8;
        memcpy(&low, codes + ROW_BYTES * (row * width / 8), sizeof low);
        low >>= at;
        if (at + width > 8) {
            memcpy(&high, codes + ROW_BYTES * (row * width / 8 + 1), sizeof high);
            low |= high << (8 - at);
        }
        low = base - (low & (uint8_t)((1 << width) - 1));
        memcpy(top + ROW_BYTES * row, &low, sizeof low);
    }
}

/* The positions of what is outside, and behind them its values. LINE bytes behind these may be filled as well. */
TARGET ALWAYS void except(uint8_t *into, const uint8_t *top, const Outside *outside)
{
    uint8_t *values = into + outside->count;
#ifdef HAS_BYTES
    for (int i = 0; i < WORDS; into += __builtin_popcountll(outside->words[i++]))
        store_marked_numbers(into, outside->words[i], 64 * i);
    for (int i = 0; i < WORDS; values += __builtin_popcountll(outside->words[i++]))
        store_marked(values, outside->words[i], top + 64 * i);
#else
    for (int i = 0; i < WORDS; i++)
        for (uint64_t left = outside->words[i]; left != 0; left &= left - 1) {
            uint8_t at = (uint8_t)(64 * i + __builtin_ctzll(left));
            *into++ = at;
            *values++ = top[at];
        }
#endif
}

TARGET ALWAYS Outside best_form(const uint8_t *top, int *width)
{
    unsigned mean = mean_of(top);
    Outside best = best_base(top, mean, *width);
    if (coded_bytes(*width, best.count) > coded_bytes(*width + 1, 0) && *width < WIDTH_MOST) {
        Outside wider = best_base(top, mean, *width + 1);
        if (coded_bytes(*width + 1, wider.count) < coded_bytes(*width, best.count)) {
            *width += 1;
            return wider;
        }
    }
    return best;
}

/* Fills the two bytes of a strip's head, and its body, whose length is returned; LINE bytes behind that may be filled. */
TARGET ALWAYS size_t narrow_strip(uint8_t *head, uint8_t *body, const uint8_t *top, int base_width)
{
    int width = base_width;
    Outside outside = best_form(top, &width);
    size_t size = coded_bytes(width, outside.count);
    head[0] = outside.base;
    head[1] = (uint8_t)(outside.count | (width > base_width ? WIDER : 0));
    if (size >= STRIP_BYTES) {
        head[0] = 0, head[1] = UNCODED;
        memcpy(body, top, STRIP_BYTES);
        return STRIP_BYTES;
    }
    switch (width) {
    case 3: press(body, top, outside.base, 3); break;
    case 4: press(body, top, outside.base, 4); break;
    case 5: press(body, top, outside.base, 5); break;
    case 6: press(body, top, outside.base, 6); break;
    case 7: press(body, top, outside.base, 7); break;
    }
    except(body + ROW_BYTES * width, top, &outside);
    return size;
}

/* A strip behind whose body there may be no room. */
TARGET ALWAYS size_t narrow_last(uint8_t *head, uint8_t *body, const uint8_t *top, int base_width)
{
    uint8_t made[STRIP_BYTES + LINE];
    size_t size = narrow_strip(head, made, top, base_width);
    memcpy(body, made, size);
    return size;
}

/* Length of a body, or more than there can be where the head is none. */
ALWAYS size_t body_bytes(uint8_t kind, int width)
{
    if (kind == UNCODED)
        return STRIP_BYTES;
    width += kind / WIDER;
    return width > WIDTH_MOST ? SIZE_MAX : coded_bytes(width, kind % WIDER);
}

TARGET ALWAYS void widen_strip(uint8_t *top, uint8_t base, uint8_t kind, const uint8_t *body, int width)
{
    if (kind == UNCODED) {
        memcpy(top, body, STRIP_BYTES);
        return;
    }
    int count = kind % WIDER;
    width += kind / WIDER;
    switch (width) {
    case 3: unpress(top, body, base, 3); break;
    case 4: unpress(top, body, base, 4); break;
    case 5: unpress(top, body, base, 5); break;
    case 6: unpress(top, body, base, 6); break;
    case 7: unpress(top, body, base, 7); break;
    }
    const uint8_t *positions = body + ROW_BYTES * width, *values = positions + count;
    for (int i = 0; i < count; i++)
        top[positions[i]] = values[i]; /* A position is a byte, and there are as many places as bytes. */
}

TARGET static int width_of(const uint8_t *source, size_t size, int element_bytes)
{
    uint8_t top[STRIP_BYTES], rest[3 * STRIP_BYTES];
    size_t step = (size_t)element_bytes * STRIP_BYTES, strips = size / step, sampled = LEAST(strips, SAMPLED_STRIPS);
    size_t sizes[WIDTH_MOST + 1] = {0};
    for (size_t i = 0; i < sampled; i++) {
        take_strip(top, rest, source + i * strips / sampled * step, element_bytes);
        for (int width = WIDTH_LEAST; width <= WIDTH_MOST; width++)
            sizes[width] += LEAST(coded_bytes(width, best_base(top, mean_of(top), width).count), STRIP_BYTES);
    }
    int best = WIDTH_LEAST;
    for (int width = WIDTH_LEAST; width <= WIDTH_MOST; width++)
        best = sizes[width] < sizes[best] ? width : best;
    return best;
}

TARGET static size_t narrow(uint8_t *into, const uint8_t *source, size_t size, int element_bytes, int width)
{
    uint8_t top[STRIP_BYTES];
    size_t step = (size_t)element_bytes * STRIP_BYTES, strips = size / step, tail = size % step;
    uint8_t *head = into, *rest = head + 2 * strips, *body = rest + (step - STRIP_BYTES) * strips;
    for (size_t i = 0; i < strips; i++) {
        take_strip(top, rest, source, element_bytes);
        if (i + 1 < strips) /* There is room for this strip and the next one as they are. */
            body += narrow_strip(head, body, top, width);
        else
            body += narrow_last(head, body, top, width);
        source += step, rest += step - STRIP_BYTES, head += 2;
    }
    memcpy(body, source, tail);
    return (size_t)(body + tail - into);
}

TARGET static int widen(uint8_t *into, size_t size, const uint8_t *stored, size_t stored_bytes, int element_bytes,
                        int width)
{
    uint8_t top[STRIP_BYTES];
    size_t step = (size_t)element_bytes * STRIP_BYTES, strips = size / step, tail = size % step;
    size_t fixed = (step - STRIP_BYTES + 2) * strips + tail;
    if (stored_bytes < fixed)
        return 0;
    const uint8_t *head = stored, *rest = head + 2 * strips, *body = rest + (step - STRIP_BYTES) * strips;
    size_t left = stored_bytes - fixed;
    for (size_t i = 0; i < strips; i++) {
        uint8_t base = head[0], kind = head[1];
        size_t here = body_bytes(kind, width);
        if (here > left)
            return 0;
        widen_strip(top, base, kind, body, width);
        put_strip(into, top, rest, element_bytes);
        into += step, rest += step - STRIP_BYTES, head += 2, body += here, left -= here;
    }
    memcpy(into, body, tail);
    return left == 0;
}
