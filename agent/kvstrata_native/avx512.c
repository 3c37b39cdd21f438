/* x86-64 with AVX-512, as far as server processors have had it from the first. */
#ifdef __x86_64__
#include "processor.h"

#define LEVEL kernels_avx512
#define LEVEL_NAME "avx512"
#ifdef __clang__
#define WIDE "" /* It knows the preference as an option alone, and refuses the whole attribute with it. */
#else
#define WIDE ",prefer-vector-width=512"
#endif
#define TARGET __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,bmi,popcnt" WIDE)))

static int is_supported(void) { return has_avx512(); }

#include "avx512.h"

#include "body.h"
#endif
