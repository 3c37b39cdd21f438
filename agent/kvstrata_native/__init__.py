"""Inner loops of the data path, compiled where the build had a C compiler. `choice.Kernels` describes each.

`level` names what runs: avx512_vbmi2, avx512, avx2, neon, scalar (compiled) or python (NumPy).
`KVSTRATA_NATIVE_LEVEL` asks for one. `copy_threads` is how many threads copy large blocks at a time, which
`KVSTRATA_COPY_THREADS` sets.
"""

import os

from kvstrata_native.choice import choose, choose_threads

level, _running = choose(os.environ.get("KVSTRATA_NATIVE_LEVEL", ""))
copy_threads = choose_threads(os.environ.get("KVSTRATA_COPY_THREADS", ""), len(os.sched_getaffinity(0)))

copy = _running.copy
copy_digest = _running.copy_digest
copy_digest_each = _running.copy_digest_each
copy_digests = _running.copy_digests
copy_sound = _running.copy_sound
digest_pairs = _running.digest_pairs
flush = _running.flush
mix = _running.mix
narrow = _running.narrow
pack = _running.pack
unmix = _running.unmix
unpack = _running.unpack
widen = _running.widen
width_of = _running.width_of
xxh3_128 = _running.xxh3_128
