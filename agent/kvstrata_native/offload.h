/* Offload interface of kvstrata: what a DPU, an accelerator or a KV controller implements, and what the agent calls.

   A library exports one function, kvstrata_offload_api. docs/offload.md has the rules in prose; in short:

   - Every struct begins with the version that its writer was compiled for, and with its size there. Fields are only ever
     added at the end, and a minor version says so. Readers take what both sides have; what is missing is zero.
   - Another major version is another interface: a host refuses a table of another major, a library a call of one.
   - Calls on one queue come from one thread at a time; all others may come at once.
   - A call that fails has done nothing. What is wrong with one descriptor is said by its completion, and the rest of its
     batch is done. Each accepted descriptor has exactly one completion.
   - Descriptors and segments are read within `submit`; the memory they name is the device's until the completion.
   - Completions come in any order. A fenced descriptor begins when all earlier ones of its queue have ended.
   - A byte that is digested and written or decoded in one descriptor is read once: both results are of that reading.
   - Nothing outside of the targets is written, and nothing at all for descriptors that are refused. Raw targets hold
     zeros after KVO_E_MISMATCH and KVO_E_CORRUPT; with other failures that come after the start they hold anything.
   - No time limit is kept by the device: the host cancels. */
#ifndef KVSTRATA_OFFLOAD_H
#define KVSTRATA_OFFLOAD_H

#include <stdint.h>

#define KVO_ABI_MAJOR 1
#define KVO_ABI_MINOR 0
#define KVO_ABI_VERSION ((uint32_t)KVO_ABI_MAJOR << 16 | KVO_ABI_MINOR)
#define KVO_ENTRY "kvstrata_offload_api"

#define KVO_DIGEST_BYTES 16
#define KVO_NAME_BYTES 64

/* Of calls and of completions. */
enum {
    KVO_OK = 0,
    KVO_E_INVALID = 1,     /* A pointer, field or combination of steps that is none. */
    KVO_E_VERSION = 2,     /* A struct of another major version, or smaller than version 1.0 has it. */
    KVO_E_UNSUPPORTED = 3, /* Steps or a codec that the device does not state among its capabilities. */
    KVO_E_LIMIT = 4,       /* More than a stated limit. */
    KVO_E_LENGTH = 5,      /* Sizes that do not fit each other, or the parameters. */
    KVO_E_ALIGNMENT = 6,   /* An address that is not aligned as the device or the codec wants it. */
    KVO_E_OVERLAP = 7,     /* A target that lies in a source, or in another target. */
    KVO_E_MEMORY = 8,      /* An unknown registration, a range outside of it, or one that wraps around. */
    KVO_E_CORRUPT = 9,     /* Stored bytes that are none of the codec. */
    KVO_E_MISMATCH = 10,   /* The digest of the source is not the expected one. */
    KVO_E_RANGE = 11,      /* A value that the codec cannot keep: the block is stored as it is. */
    KVO_E_FULL = 12,       /* The queue or the table of fingerprints has no room. */
    KVO_E_NOT_FOUND = 13,  /* No such tag under way. */
    KVO_E_BUSY = 14,       /* It has begun, or is in use. */
    KVO_E_CANCELLED = 15,
    KVO_E_LATE = 16,       /* A hint whose deadline has passed; nothing was done. */
    KVO_E_DEVICE = 17      /* The device failed. The host does it itself. */
};

/* Steps of one descriptor; together they are one pass. The combinations that there are:
   COPY, DIGEST, COPY|DIGEST, with VERIFY or without, and VERIFY alone;
   ENCODE and DECODE, each with COPY, DIGEST, VERIFY (DECODE alone) or without;
   LOOKUP, INSERT or REMOVE, the first two with DIGEST or without; PREFETCH. */
enum {
    KVO_STEP_COPY = 1 << 0,    /* All sources, one behind the other, to all targets; with a codec: of its raw side. */
    KVO_STEP_DIGEST = 1 << 1,  /* XXH3-128, canonical, of the raw side, under 1 or 2 seeds. */
    KVO_STEP_VERIFY = 1 << 2,  /* The digest of the sources under seeds[0] has to be `expected`. */
    KVO_STEP_ENCODE = 1 << 3,
    KVO_STEP_DECODE = 1 << 4,  /* With VERIFY the first digest is of the stored side, those of the raw side follow. */
    KVO_STEP_LOOKUP = 1 << 5,  /* Of `fingerprint`, or of the digest under seeds[0], within `scope`. */
    KVO_STEP_INSERT = 1 << 6,  /* `value` under it, unless there is one: then that is found. */
    KVO_STEP_REMOVE = 1 << 7,
    KVO_STEP_PREFETCH = 1 << 8 /* A hint: the sources are read soon, before deadline_ns. */
};

enum {
    KVO_FLAG_FENCE = 1 << 0,
    KVO_FLAG_STREAM = 1 << 1 /* The target is not read soon: it need not pass the host's caches. */
};

/* Codecs; docs/format.md has the bytes. Raw side, stored side, in segments:
   NARROW  raw               stored
   PACK    raw               codes, scales
   MIX     raw               stored, and when encoding rungs (read and written) and errors (float64), of each plane:
                             what is lost, or up to 0.8 % of the plane more. */
enum { KVO_CODEC_NONE = 0, KVO_CODEC_NARROW = 1, KVO_CODEC_PACK = 2, KVO_CODEC_MIX = 3 };

enum {
    KVO_CAP_COPY = 1 << 0,
    KVO_CAP_DIGEST = 1 << 1, /* And VERIFY. */
    KVO_CAP_NARROW = 1 << 2,
    KVO_CAP_PACK = 1 << 3,
    KVO_CAP_MIX = 1 << 4,
    KVO_CAP_DEDUP = 1 << 5,
    KVO_CAP_PREFETCH = 1 << 6,
    KVO_CAP_FUSED = 1 << 7,     /* Steps together with a codec or with fingerprints. */
    KVO_CAP_SHARED_MEMORY = 1 << 8, /* Takes addresses of the process that are not registered. */
    KVO_CAP_EMULATED = 1 << 9   /* Software that plays a device. Status, logs and metrics of the host say so. */
};

enum { KVO_URGENCY_BACKGROUND = 0, KVO_URGENCY_NORMAL = 1, KVO_URGENCY_WAITED_FOR = 2 };
enum { KVO_REUSE_UNKNOWN = 0, KVO_REUSE_ONCE = 1, KVO_REUSE_SOON = 2, KVO_REUSE_OFTEN = 3 };

/* Memory of the host. `memory` is a registration, in which it lies whole, or 0. */
typedef struct {
    uint64_t address;
    uint64_t size_bytes;
    uint64_t memory;
} KvoSegment;

/* Of codecs; those that a codec does not name are 0. */
typedef struct {
    uint32_t element_bytes; /* NARROW: 1, 2 or 4. */
    uint32_t width;         /* NARROW and MIX: bits of a code, 3 to 7. */
    uint32_t kind;          /* PACK: 0 FP8, 1 INT8, 2 INT4. */
    uint32_t is_by_column;  /* PACK. */
    uint32_t is_rotated;    /* MIX, encoding. */
    uint32_t zero;
    uint64_t planes, rows;  /* MIX. */
    uint64_t columns;       /* PACK and MIX. */
    uint64_t group;         /* PACK: elements that share a scale. */
    double limit;           /* MIX, encoding: relative error that a plane may have. */
} KvoParameters;

typedef struct {
    uint32_t abi_version, size_bytes;
    uint64_t tag;         /* The host's; comes back in the completion. */
    uint32_t steps, flags;
    uint64_t scope;       /* Trust scope. Fingerprints of one are never found in another. */
    uint64_t deadline_ns; /* Of CLOCK_MONOTONIC; 0: none. */
    uint8_t priority;     /* 0 to 255: among descriptors that wait, the highest first, if the device can. */
    uint8_t urgency, reuse, zero;
    uint32_t codec;
    uint32_t source_count, target_count;
    const KvoSegment *sources, *targets;
    uint64_t seeds[2];
    uint32_t seed_count, zero2;
    uint8_t expected[KVO_DIGEST_BYTES];
    uint8_t fingerprint[KVO_DIGEST_BYTES];
    uint64_t value;
    KvoParameters parameters;
} KvoDescriptor;

typedef struct {
    uint32_t abi_version, size_bytes;
    uint64_t tag;
    int32_t status;
    uint32_t is_found;       /* Of fingerprints. */
    uint64_t filled_bytes;   /* From the start of the targets; of PACK and MIX without what stands beside the codes. */
    uint64_t value;          /* Of the fingerprint that was found. */
    uint8_t digests[2][KVO_DIGEST_BYTES];
    uint64_t waited_ns, served_ns; /* In the queue, and at work. */
    uint64_t energy_nj;      /* 0: not measured. */
} KvoCompletion;

typedef struct {
    uint32_t abi_version, size_bytes;
    char name[KVO_NAME_BYTES], version[KVO_NAME_BYTES]; /* Of the device, ending with a zero. */
    uint32_t capabilities;
    uint32_t queues_max, depth_max, batch_max, segments_max, registrations_max;
    uint32_t alignment_bytes;   /* Of all segments; a power of two. */
    uint32_t digest_bytes_min;  /* Shorter sources are the host's to digest; at most 241. */
    uint64_t bytes_max;         /* Of one descriptor's sources, and of its targets. */
    uint64_t fingerprints_max;
} KvoDescription;

typedef struct {
    uint32_t abi_version, size_bytes;
    uint64_t descriptors, failures, cancelled, source_bytes, target_bytes, busy_ns, energy_nj;
    uint64_t fingerprints; /* Held now. */
} KvoCounters;

typedef struct KvoDevice KvoDevice;
typedef struct KvoQueue KvoQueue;

/* All functions return KVO_OK or KVO_E_*. */
typedef struct {
    uint32_t abi_version, size_bytes;
    int32_t (*open)(uint32_t abi_version, const char *configuration, KvoDevice **device);
    /* `configuration` is the device's own, a string or NULL. KVO_E_VERSION for another major. */
    int32_t (*close)(KvoDevice *device);
    /* KVO_E_BUSY while it has queues. */
    int32_t (*describe)(KvoDevice *device, KvoDescription *description);
    int32_t (*count)(KvoDevice *device, KvoCounters *counters);
    int32_t (*register_memory)(KvoDevice *device, uint64_t address, uint64_t size_bytes, uint64_t *memory);
    /* For DMA: stays where it is, and mapped, until it is unregistered. Never 0. */
    int32_t (*unregister_memory)(KvoDevice *device, uint64_t memory);
    /* KVO_E_BUSY while a descriptor that is under way names it, KVO_E_MEMORY for an unknown one. */
    int32_t (*queue_create)(KvoDevice *device, uint32_t depth, KvoQueue **queue);
    int32_t (*queue_destroy)(KvoQueue *queue);
    /* What has not begun never will; returns when nothing is under way, and the memory is the host's again. */
    int32_t (*submit)(KvoQueue *queue, const KvoDescriptor *batch, uint32_t count, uint32_t *accepted);
    /* The first `accepted` are taken; KVO_E_FULL when that is fewer than all. The depth counts what waits, what is
       under way, and completions that were not polled. */
    int32_t (*poll)(KvoQueue *queue, KvoCompletion *completions, uint32_t most, uint64_t timeout_ns, uint32_t *count);
    /* Waits for the first one, so long at most; 0 of them is no error. */
    int32_t (*cancel)(KvoQueue *queue, uint64_t tag);
    /* KVO_OK: its completion is KVO_E_CANCELLED, and nothing was written. KVO_E_BUSY: it comes to its end. */
} KvoApi;

/* The table, for as long as the library is loaded. Whatever the host's version: a host of another major names both. */
#if defined(__GNUC__)
__attribute__((visibility("default")))
#endif
const KvoApi *kvstrata_offload_api(uint32_t host_abi_version);

#endif
