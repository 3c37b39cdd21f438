/* Which kernels there are, and which of them this processor can run. */
#include "levels.h"

#include <string.h>

const Kernels *const all_kernels[] = {
#ifdef __x86_64__
    &kernels_avx512_vbmi2, &kernels_avx512, &kernels_avx2,
#endif
    &kernels_scalar, NULL,
};

const Kernels *kernels_named(const char *name)
{
    for (const Kernels *const *at = all_kernels; *at != NULL; at++)
        if ((name == NULL || strcmp((*at)->name, name) == 0) && (*at)->is_supported())
            return *at;
    return NULL;
}
