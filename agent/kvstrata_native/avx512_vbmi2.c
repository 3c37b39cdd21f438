/* x86-64 with AVX-512 and what it does with bytes: servers from Ice Lake and Zen 4 on. */
#ifdef __x86_64__
#include "processor.h"

#define LEVEL kernels_avx512_vbmi2
#define LEVEL_NAME "avx512_vbmi2"
#ifdef __clang__
#define WIDE "" /* As in avx512.c. */
#else
#define WIDE ",prefer-vector-width=512"
#endif
#define TARGET \
    __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni,bmi,bmi2,popcnt" WIDE)))

static int is_supported(void) { return has_avx512_vbmi2(); }

#define HAS_BYTES
#include "avx512.h"

#include "body.h"
#endif
