/* CPUID and XGETBV: Intel's manual, volume 2A, and volume 1, chapter 13. */
#ifdef __x86_64__
#include "processor.h"

#include <cpuid.h>

#define BIT(n) (1u << (n))

/* Of leaf 1, ECX. */
#define FMA BIT(12)
#define POPCNT BIT(23)
#define OSXSAVE BIT(27)
/* Of leaf 7, EBX. */
#define AVX2 (BIT(3) | BIT(5)) /* With bmi, and with fma of leaf 1, as all makers have it but in a few chips. */
#define AVX512 (BIT(16) | BIT(17) | BIT(30) | BIT(31)) /* f, dq, bw, vl. */
#define BMI2 BIT(8)
#define CLFLUSHOPT BIT(23)
/* Of leaf 7, ECX. */
#define VBMI2 (BIT(1) | BIT(6) | BIT(11)) /* vbmi, vbmi2, vnni. */
/* Of XCR0: what is kept when another thread runs. */
#define KEEPS_YMM (BIT(1) | BIT(2))
#define KEEPS_ZMM (KEEPS_YMM | BIT(5) | BIT(6) | BIT(7))

static int has(unsigned ebx, unsigned ecx, unsigned kept)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (FMA | POPCNT | OSXSAVE)) != (FMA | POPCNT | OSXSAVE))
        return 0;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & kept) != kept || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    return (b & ebx) == ebx && (c & ecx) == ecx;
}

int has_avx2(void) { return has(AVX2, 0, KEEPS_YMM); }

int has_avx512(void) { return has(AVX2 | AVX512, 0, KEEPS_ZMM); }

int has_clflushopt(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & CLFLUSHOPT);
}

int has_avx512_vbmi2(void) { return has(AVX2 | AVX512 | BMI2, VBMI2, KEEPS_ZMM); }
#endif
