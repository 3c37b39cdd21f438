/* x86-64 with AVX-512, as far as server processors have had it from the first. */
#ifdef __x86_64__
#define LEVEL kernels_avx512
#define LEVEL_NAME "avx512"
#ifdef __clang__
#define WIDE "" /* It knows the preference as an option alone, and refuses the whole attribute with it. */
#else
#define WIDE ",prefer-vector-width=512"
#endif
#define TARGET __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,bmi,popcnt" WIDE)))

static int is_supported(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
}

#include "avx512.h"

#include "body.h"
#endif
