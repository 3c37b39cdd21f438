/* Which of the instruction sets that kernels are compiled for this x86-64 processor has, and its operating system keeps
   the registers of. The processor is asked itself: __builtin_cpu_supports answers "none" where Zig's runtime library is
   linked, as in wheels of a release. */
#ifndef KVSTRATA_PROCESSOR_H
#define KVSTRATA_PROCESSOR_H

#ifdef __x86_64__
int has_avx2(void);         /* And bmi, popcnt. */
int has_avx512(void);       /* f, bw, dq, vl; and avx2, bmi, popcnt. */
int has_avx512_vbmi2(void); /* The same, vbmi, vbmi2, vnni, bmi2. */
int has_clflushopt(void);   /* Lines leave the caches several at a time. */
#endif

#endif
