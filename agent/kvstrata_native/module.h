/* What the parts of the module `_kernels` share. */
#ifndef KVSTRATA_MODULE_H
#define KVSTRATA_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

/* Below this, waiting to hold the GIL again costs more than the work. */
#define RELEASE_FROM_BYTES (32u << 10)

extern const Kernels *chosen;
extern PyObject *short_digest; /* xxhash.xxh3_128_digest, for what is shorter than HASHED_FROM_BYTES. */
extern PyMethodDef memory_functions[], codec_functions[], offload_functions[];

/* Lets go of the engine that is attached, if one is: kernels of this processor from here on. */
void detach_engine(void);

#endif
