/* The kernels by level. */
#ifndef KVSTRATA_LEVELS_H
#define KVSTRATA_LEVELS_H

#include "kernels.h"

/* The best one first; NULL behind the last. Some may not be for this processor. */
extern const Kernels *const all_kernels[];

/* Of a level that this processor can run, the best one for NULL; NULL where there is none. */
const Kernels *kernels_named(const char *name);

#endif
