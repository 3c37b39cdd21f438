/* Codes of vectors of elements, and what they come back as; part of body.h.

   A chunk is a vector of pairs: its elements at even places are widened by a shift and those at odd places by a mask,
   so nothing crosses lanes, neither on the way in nor where codes become bytes. */

/* Numbers for the elements of a vector. Where all have one scale, what codes come back as may be looked up. */
typedef struct {
    Floats by, inverse, low, table[2];
} Shares;

typedef struct {
    Words code;  /* In the low bits; what stands above them means nothing. */
    Floats back; /* Not rounded yet. */
    Floats step; /* What the code is worth, in steps: the scale is worth one. */
    Floats off;  /* What it loses, in steps. */
    Words place; /* In the low bits: where it stands in a table. */
    Floats unit; /* Of what stands there. */
} Coded;

/* A number is added whose last bit is worth one step of e4m3 there: subnormals have the steps of the least normals, and
   scales are such that nothing is rounded to more than 448. What is added to the rounder beside its power makes the
   sum's low bits and the power's give the code by one addition. */
TARGET ALWAYS Coded coded_fp8(Floats magnitudes, Shares shares)
{
    const uint32_t normal_from = 0x3C800000, rounder_above = (20u << 23) + (256 * 5 - (normal_from >> 20) - 160);
    Floats scaled = magnitudes * shares.inverse;
    Words power = (Words)larger(scaled, (Floats){0} + float_of(normal_from)) & 0x7F800000;
    Floats rounder = (Floats)(power + rounder_above), sum = scaled + rounder;
    Floats step = sum - rounder;
    return (Coded){(Words)sum + ((Words)sum >> 20), step * shares.by, step, scaled - step, (Words)sum, (Floats)power};
}

TARGET ALWAYS Coded coded_int8(Floats values, Shares shares)
{
    Floats scaled = values * shares.inverse, sum = scaled + 0x1.8p23f, step = sum - 0x1.8p23f;
    return (Coded){.code = (Words)sum, .back = step * shares.by, .step = step, .off = scaled - step};
}

TARGET ALWAYS Coded coded_int4(Floats values, Shares shares)
{
    Floats scaled = (values - shares.low) * shares.inverse, sum = scaled + 0x1p23f, step = sum - 0x1p23f;
    Floats back = step * shares.by + shares.low;
    return (Coded){(Words)sum, back, step, scaled - step, (Words)sum, (Floats){0} + 1.0f};
}

TARGET ALWAYS Coded coded_of(Floats values, Shares shares, int kind)
{
    return kind == FP8    ? coded_fp8(values, shares)
           : kind == INT8 ? coded_int8(values, shares)
                          : coded_int4(values, shares);
}

TARGET ALWAYS Floats rounded_to_bf16(Floats values) { return (Floats)rounded_words((Vector)values); }

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

#ifdef HAS_EIGHTS
/* Shares of e4m3 with what is lost of each eighth of a power of two where it is rounded to bf16, as a part of it: the
   same at any power. */
TARGET ALWAYS Shares with_eighths(Shares shares)
{
    Floats eighths = __builtin_convertvector((Words)NUMBERS & 7, Floats) * 0.125f + 1.0f;
    shares.table[0] = 1.0f - rounded_to_bf16(eighths * shares.by) * shares.inverse * (1.0f / eighths);
    return shares;
}
#endif

/* What a code comes back as. */
TARGET ALWAYS Floats came_back(Coded coded, Shares shares, int kind, int is_tabled)
{
#ifdef HAS_TABLES
    if (is_tabled && kind == FP8)
        return looked_up(shares.table[0], shares.table[1], (Vector)coded.place) * coded.unit;
    if (is_tabled && kind == INT4)
        return looked_up_once(shares.table[0], (Vector)coded.place);
#else
    (void)shares, (void)kind, (void)is_tabled;
#endif
    return rounded_to_bf16(coded.back);
}

#ifndef HAS_BYTES
/* The lowest bytes of words, of `even` and `odd` in turns. */
TARGET ALWAYS void store_lowest_bytes(uint8_t *into, Vector even, Vector odd)
{
    store_halves(into, (Vector)(((Words)even & 0xFFFF) | (Words)odd << 16));
}

/* The same, with the signs of halves as their top bits. */
TARGET ALWAYS void store_signed_bytes(uint8_t *into, Vector even, Vector odd, Vector halves)
{
    Words both = ((Words)even & 0x7F) | ((Words)odd & 0x7F) << 16;
    store_halves(into, (Vector)(both | ((Words)halves >> 8 & 0x800080)));
}
#endif

TARGET ALWAYS void store_chunk(uint8_t *codes, Words even, Words odd, Words chunk, int kind)
{
    if (kind == INT4)
        store_words(codes, (Vector)((even & 0xF) | (odd & 0xF) << 4));
    else if (kind == INT8)
        store_lowest_bytes(codes, (Vector)even, (Vector)odd);
    else
        store_signed_bytes(codes, (Vector)even, (Vector)odd, (Vector)chunk);
}

#define PARTS (LANES / CHUNK)

/* LANES elements, and the codes of those at even places and of those at odd ones. */
typedef struct {
    Words chunks[PARTS], codes[2][PARTS];
} Coding;

TARGET ALWAYS void store_coding(uint8_t *into, const Coding *coding, int kind)
{
#ifdef HAS_PAIRS
    Vector even[PARTS], odd[PARTS], halves[PARTS];
    for (int part = 0; part < PARTS; part++) {
        even[part] = (Vector)coding->codes[0][part], odd[part] = (Vector)coding->codes[1][part];
        halves[part] = (Vector)coding->chunks[part];
    }
    if (kind == INT4)
        store_nibbles(into, even, odd);
    else if (kind == INT8)
        store_bytes(into, even, odd);
    else
        store_signed(into, even, odd, halves);
#else
    for (int part = 0; part < PARTS; part++)
        store_chunk(into + CODES(CHUNK * part), coding->codes[0][part], coding->codes[1][part], coding->chunks[part],
                    kind);
#endif
}

TARGET ALWAYS Shares shares_at(const Split *split, size_t i, int kind)
{
    return (Shares){floats_at(split->by + i), floats_at(split->inverse + i),
                    kind == INT4 ? floats_at(split->low + i) : (Floats){0}, {{0}, {0}}};
}

/* Those of group `i`, for all elements. */
TARGET ALWAYS Shares shares_of_all(const Split *split, size_t i, int kind)
{
    size_t at = i / CHUNK * CHUNK + i % 2 * FLOATS + i % CHUNK / 2;
    return (Shares){everywhere(split->by[at]), everywhere(split->inverse[at]),
                    kind == INT4 ? everywhere(split->low[at]) : (Floats){0}, {{0}, {0}}};
}
