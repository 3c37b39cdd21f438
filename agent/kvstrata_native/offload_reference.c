/* The offload interface over the kernels of this processor: what other devices are compared with.

   A queue's work is done by the thread that polls it, so that what was submitted can be cancelled until then. The device
   is named "reference"; built with KVO_EMULATED it plays an accelerator, and says so. `configuration` names a level of
   kernels. KVO_DEFECTS builds one that can be wrong, for the tests of the conformance kit. */
#define _DEFAULT_SOURCE /* madvise and clock_gettime. */
#include "offload.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "levels.h"

/* Wrong on purpose, in builds for tests alone: by the number in $KVO_DEFECT when the device is opened. */
#ifdef KVO_DEFECTS
static int defect;
#else
enum { defect = 0 };
#endif
enum { DEFECT_DIGEST_TAIL = 1, DEFECT_BYTE_TOO_MANY, DEFECT_LOST_COMPLETION, DEFECT_WRONG_ERROR, DEFECT_UNVERIFIED,
       DEFECT_READ_TWICE, DEFECT_SCOPES_MIXED, DEFECT_FENCE_IGNORED };

#ifdef KVO_EMULATED
#define NAME "emulated-accelerator"
#define IS_EMULATED KVO_CAP_EMULATED
#else
#define NAME "reference"
#define IS_EMULATED 0
#endif
#define VERSION "1.0"

enum { QUEUES_MAX = 256, DEPTH_MAX = 1024, SEGMENTS_MAX = 16, REGISTRATIONS_MAX = 4096 };
#define BYTES_MAX (1ull << 32)
#define FINGERPRINTS_MAX (1u << 20)
#define STREAM_FROM_BYTES (64u << 10) /* As copies of the module do; module_memory.c has the measurement. */
#define CAPABILITIES                                                                                                   \
    (KVO_CAP_COPY | KVO_CAP_DIGEST | KVO_CAP_NARROW | KVO_CAP_PACK | KVO_CAP_MIX | KVO_CAP_DEDUP | KVO_CAP_PREFETCH |  \
     KVO_CAP_FUSED | KVO_CAP_SHARED_MEMORY | IS_EMULATED)

typedef struct {
    uint64_t scope, value;
    uint8_t fingerprint[KVO_DIGEST_BYTES];
    enum { SLOT_FREE, SLOT_HELD, SLOT_GONE } state;
} Fingerprint;

typedef struct {
    uint64_t address, size_bytes, users;
    int is_held;
} Registration;

struct KvoDevice {
    const Kernels *kernels;
    pthread_mutex_t lock; /* Of all below. */
    Fingerprint *table;
    size_t room, held, used; /* Slots; those that hold one; those that are not free. */
    Registration registrations[REGISTRATIONS_MAX];
    uint32_t queues;
    atomic_uint_fast64_t descriptors, failures, cancelled, source_bytes, target_bytes, busy_ns;
};

typedef struct {
    KvoDescriptor asked;
    KvoSegment segments[2 * SEGMENTS_MAX];
    uint64_t submitted_ns;
    int32_t status; /* What `check` found. */
    enum { ENTRY_FREE, ENTRY_WAITS, ENTRY_CANCELLED } state;
} Entry;

struct KvoQueue {
    KvoDevice *device;
    uint32_t depth, first, count; /* A ring: entries from `first` on, some of which may have ended. */
    Entry entries[];
};

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int is_our_major(uint32_t version) { return version >> 16 == KVO_ABI_MAJOR; }

static int32_t open_device(uint32_t abi_version, const char *configuration, KvoDevice **device)
{
    if (device == NULL)
        return KVO_E_INVALID;
    *device = NULL;
    if (!is_our_major(abi_version))
        return KVO_E_VERSION;
    const Kernels *kernels = kernels_named(configuration != NULL && *configuration ? configuration : NULL);
    if (kernels == NULL)
        return KVO_E_INVALID;
    KvoDevice *made = calloc(1, sizeof *made);
    if (made == NULL)
        return KVO_E_DEVICE;
#ifdef KVO_DEFECTS
    defect = getenv("KVO_DEFECT") != NULL ? atoi(getenv("KVO_DEFECT")) : 0;
#endif
    made->kernels = kernels;
    pthread_mutex_init(&made->lock, NULL);
    *device = made;
    return KVO_OK;
}

static int32_t close_device(KvoDevice *device)
{
    if (device == NULL)
        return KVO_E_INVALID;
    pthread_mutex_lock(&device->lock);
    uint32_t queues = device->queues;
    pthread_mutex_unlock(&device->lock);
    if (queues)
        return KVO_E_BUSY;
    pthread_mutex_destroy(&device->lock);
    free(device->table);
    free(device);
    return KVO_OK;
}

/* Fills as much of `into` as its owner has room for, and leaves the versions that the owner wrote. */
static int32_t give(void *into, const void *made, size_t made_bytes, size_t least_bytes)
{
    uint32_t head[2];
    if (into == NULL)
        return KVO_E_INVALID;
    memcpy(head, into, sizeof head);
    if (!is_our_major(head[0]) || head[1] < least_bytes)
        return KVO_E_VERSION;
    size_t bytes = head[1] < made_bytes ? head[1] : made_bytes;
    memcpy((char *)into + sizeof head, (const char *)made + sizeof head, bytes - sizeof head);
    return KVO_OK;
}

static int32_t describe(KvoDevice *device, KvoDescription *description)
{
    if (device == NULL)
        return KVO_E_INVALID;
    KvoDescription made = {
        .name = NAME, .version = VERSION, .capabilities = CAPABILITIES, .queues_max = QUEUES_MAX,
        .depth_max = DEPTH_MAX, .batch_max = DEPTH_MAX, .segments_max = SEGMENTS_MAX,
        .registrations_max = REGISTRATIONS_MAX, .alignment_bytes = 1, .digest_bytes_min = HASHED_FROM_BYTES,
        .bytes_max = BYTES_MAX, .fingerprints_max = FINGERPRINTS_MAX,
    };
    return give(description, &made, sizeof made, sizeof made);
}

static int32_t count_device(KvoDevice *device, KvoCounters *counters)
{
    if (device == NULL)
        return KVO_E_INVALID;
    pthread_mutex_lock(&device->lock);
    KvoCounters made = {
        .descriptors = device->descriptors, .failures = device->failures, .cancelled = device->cancelled,
        .source_bytes = device->source_bytes, .target_bytes = device->target_bytes, .busy_ns = device->busy_ns,
        .fingerprints = device->held,
    };
    pthread_mutex_unlock(&device->lock);
    return give(counters, &made, sizeof made, sizeof made);
}

/* Registrations: the handle is a place and 1, so that 0 is none. */

static int32_t register_memory(KvoDevice *device, uint64_t address, uint64_t size_bytes, uint64_t *memory)
{
    if (device == NULL || memory == NULL || address == 0 || size_bytes == 0 || address + size_bytes < address)
        return KVO_E_INVALID;
    int32_t status = KVO_E_LIMIT;
    pthread_mutex_lock(&device->lock);
    for (uint32_t i = 0; i < REGISTRATIONS_MAX && status == KVO_E_LIMIT; i++)
        if (!device->registrations[i].is_held) {
            device->registrations[i] = (Registration){address, size_bytes, 0, 1};
            *memory = i + 1;
            status = KVO_OK;
        }
    pthread_mutex_unlock(&device->lock);
    return status;
}

static int32_t unregister_memory(KvoDevice *device, uint64_t memory)
{
    if (device == NULL)
        return KVO_E_INVALID;
    int32_t status = KVO_E_MEMORY;
    pthread_mutex_lock(&device->lock);
    if (memory >= 1 && memory <= REGISTRATIONS_MAX && device->registrations[memory - 1].is_held) {
        status = device->registrations[memory - 1].users ? KVO_E_BUSY : KVO_OK;
        if (status == KVO_OK)
            device->registrations[memory - 1].is_held = 0;
    }
    pthread_mutex_unlock(&device->lock);
    return status;
}

static const KvoSegment *sources_of(const Entry *entry) { return entry->segments; }
static const KvoSegment *targets_of(const Entry *entry) { return entry->segments + SEGMENTS_MAX; }

/* Takes the registrations that an entry names, or gives them back; the first that there is none of, or that a segment
   leaves, is KVO_E_MEMORY. */
static int32_t use_memory(KvoDevice *device, const Entry *entry, int is_taken)
{
    const KvoDescriptor *asked = &entry->asked;
    uint32_t count = asked->source_count + asked->target_count, done = 0;
    int is_named = 0;
    for (uint32_t i = 0; i < count && !is_named; i++)
        is_named = (i < asked->source_count ? sources_of(entry)[i] : targets_of(entry)[i - asked->source_count]).memory != 0;
    if (!is_named)
        return KVO_OK;
    int32_t status = KVO_OK;
    pthread_mutex_lock(&device->lock);
    for (; done < count && status == KVO_OK; done++) {
        const KvoSegment *one = done < asked->source_count ? &sources_of(entry)[done]
                                                           : &targets_of(entry)[done - asked->source_count];
        if (one->memory == 0)
            continue;
        Registration *held = one->memory <= REGISTRATIONS_MAX ? &device->registrations[one->memory - 1] : NULL;
        if (held == NULL || !held->is_held || one->address < held->address || one->size_bytes > held->size_bytes ||
            one->address - held->address > held->size_bytes - one->size_bytes)
            status = KVO_E_MEMORY;
        else
            held->users += is_taken ? 1 : (uint64_t)-1;
    }
    for (uint32_t i = 0; status != KVO_OK && i + 1 < done; i++) { /* The last one was not taken. */
        const KvoSegment *one = i < asked->source_count ? &sources_of(entry)[i] : &targets_of(entry)[i - asked->source_count];
        if (one->memory)
            device->registrations[one->memory - 1].users--;
    }
    pthread_mutex_unlock(&device->lock);
    return status;
}

/* What a descriptor asks for, checked before anything is done. */

static uint64_t bytes_of(const KvoSegment *segments, uint32_t count)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++)
        bytes += segments[i].size_bytes;
    return bytes;
}

static int have_steps(const KvoDescriptor *asked)
{
    uint32_t with = asked->steps & ~(uint32_t)(KVO_STEP_DIGEST | KVO_STEP_VERIFY | KVO_STEP_COPY);
    uint32_t checks = asked->steps & (KVO_STEP_DIGEST | KVO_STEP_VERIFY | KVO_STEP_COPY);
    switch (with) {
    case 0: return checks != 0 && asked->codec == KVO_CODEC_NONE;
    case KVO_STEP_ENCODE: return !(checks & KVO_STEP_VERIFY) && asked->codec != KVO_CODEC_NONE;
    case KVO_STEP_DECODE: return asked->codec != KVO_CODEC_NONE;
    case KVO_STEP_LOOKUP:
    case KVO_STEP_INSERT: return !(checks & ~(uint32_t)KVO_STEP_DIGEST) && asked->codec == KVO_CODEC_NONE;
    case KVO_STEP_REMOVE:
    case KVO_STEP_PREFETCH: return checks == 0 && asked->codec == KVO_CODEC_NONE;
    default: return 0;
    }
}

static int have_seeds(const KvoDescriptor *asked)
{
    uint32_t is_verified = (asked->steps & KVO_STEP_VERIFY) != 0, is_digested = (asked->steps & KVO_STEP_DIGEST) != 0;
    if (!is_verified && !is_digested)
        return asked->seed_count == 0;
    uint32_t least = asked->steps & KVO_STEP_DECODE ? is_verified + is_digested : 1;
    return asked->seed_count >= least && asked->seed_count <= (is_digested ? 2u : 1u);
}

/* Segments of each side: the raw one may be of many with COPY, or without a codec. */
static int have_counts(const KvoDescriptor *asked)
{
    uint32_t s = asked->source_count, t = asked->target_count, steps = asked->steps;
    uint32_t stored = asked->codec == KVO_CODEC_PACK ? 2 : 1;
    int is_many = (steps & KVO_STEP_COPY) != 0;
    if (steps & KVO_STEP_ENCODE)
        return (is_many ? s >= 1 : s == 1) && t == (asked->codec == KVO_CODEC_MIX ? 3 : stored);
    if (steps & KVO_STEP_DECODE)
        return s == stored && (is_many ? t >= 1 : t == 1);
    if (steps & (KVO_STEP_LOOKUP | KVO_STEP_INSERT | KVO_STEP_REMOVE))
        return (steps & KVO_STEP_DIGEST ? s >= 1 : s == 0) && t == 0;
    return s >= 1 && (steps & KVO_STEP_COPY ? t >= 1 : t == 0);
}

static int overlap(const KvoSegment *a, const KvoSegment *b)
{
    return a->size_bytes && b->size_bytes && a->address < b->address + b->size_bytes &&
           b->address < a->address + a->size_bytes;
}

static int32_t check_segments(const KvoSegment *segments, uint32_t count)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (segments[i].address + segments[i].size_bytes < segments[i].address ||
            (segments[i].address == 0 && segments[i].size_bytes))
            return KVO_E_MEMORY;
        if (segments[i].size_bytes > BYTES_MAX || (bytes += segments[i].size_bytes) > BYTES_MAX)
            return KVO_E_LIMIT;
    }
    return KVO_OK;
}

static uint64_t address_bits(const KvoSegment *segments, uint32_t count)
{
    uint64_t bits = 0;
    for (uint32_t i = 0; i < count; i++)
        bits |= segments[i].size_bytes ? segments[i].address : 0;
    return bits;
}

/* The raw and the stored side of a codec. `raw_bytes` may lie in more than one segment. */
typedef struct {
    const KvoSegment *raw, *stored;
    uint32_t raw_count, stored_count;
    uint64_t raw_bytes;
    int is_encoded;
} Sides;

static Sides sides_of(const Entry *entry)
{
    int is_encoded = (entry->asked.steps & KVO_STEP_ENCODE) != 0;
    Sides sides = {.is_encoded = is_encoded,
                   .raw = is_encoded ? sources_of(entry) : targets_of(entry),
                   .raw_count = is_encoded ? entry->asked.source_count : entry->asked.target_count,
                   .stored = is_encoded ? targets_of(entry) : sources_of(entry),
                   .stored_count = is_encoded ? entry->asked.target_count : entry->asked.source_count};
    sides.raw_bytes = bytes_of(sides.raw, sides.raw_count);
    return sides;
}

static int have_width(const KvoParameters *p) { return p->width >= WIDTH_LEAST && p->width <= WIDTH_MOST; }

static int32_t check_narrow(const KvoParameters *p, const Sides *sides)
{
    if ((p->element_bytes != 1 && p->element_bytes != 2 && p->element_bytes != 4) || !have_width(p))
        return KVO_E_INVALID;
    uint64_t need = sides->raw_bytes + 2 * (sides->raw_bytes / ((uint64_t)p->element_bytes * STRIP_BYTES));
    return sides->is_encoded && sides->stored[0].size_bytes < need ? KVO_E_LENGTH : KVO_OK;
}

static Grid grid_of(const KvoParameters *p, uint64_t raw_bytes)
{
    return (Grid){.kind = (int)p->kind, .is_by_column = p->is_by_column != 0, .columns = p->columns, .group = p->group,
                  .rows = p->columns ? raw_bytes / 2 / p->columns : 0};
}

static int32_t check_pack(const KvoParameters *p, const Sides *sides)
{
    uint64_t count = sides->raw_bytes / 2, run = p->is_by_column ? p->columns : p->group;
    uint64_t per_byte = p->kind == INT4 ? 2 : 1;
    if (p->kind > INT4 || p->columns == 0 || p->group == 0 || (!p->is_by_column && p->columns % p->group != 0) ||
        run % per_byte != 0)
        return KVO_E_INVALID;
    if (sides->raw_bytes % 2 != 0 || count % p->columns != 0)
        return KVO_E_LENGTH;
    uint64_t rows = count / p->columns, bands = rows / p->group + (rows % p->group != 0);
    uint64_t groups = p->is_by_column ? bands * p->columns : count / p->group;
    if (sides->stored[0].size_bytes != count / per_byte || sides->stored[1].size_bytes != groups * 2 * per_byte)
        return KVO_E_LENGTH;
    return (address_bits(sides->raw, sides->raw_count) | address_bits(sides->stored + 1, 1)) % 2 ? KVO_E_ALIGNMENT
                                                                                                 : KVO_OK;
}

static Mixing mixing_of(const KvoParameters *p)
{
    return (Mixing){.planes = p->planes, .rows = p->rows, .columns = p->columns, .width = (int)p->width,
                    .is_rotated = p->is_rotated != 0, .limit = p->limit};
}

static int32_t check_mix(const KvoParameters *p, const Sides *sides)
{
    if (p->planes == 0 || p->rows == 0 || p->columns == 0 || p->columns % 2 != 0 || p->rows > PLANE_BYTES_MOST ||
        p->columns > PLANE_BYTES_MOST || 2 * p->rows * p->columns > PLANE_BYTES_MOST || !have_width(p))
        return KVO_E_INVALID;
    uint64_t plane_bytes = 2 * p->rows * p->columns;
    if (sides->raw_bytes / plane_bytes != p->planes || sides->raw_bytes % plane_bytes != 0)
        return KVO_E_LENGTH;
    if (sides->is_encoded) {
        uint64_t need = (HEAD_BYTES + plane_bytes) * p->planes + plane_bytes / STRIP_BYTES;
        if (sides->stored[0].size_bytes < need || sides->stored[1].size_bytes != p->planes ||
            sides->stored[2].size_bytes != sizeof(double) * p->planes)
            return KVO_E_LENGTH;
        if (sides->stored[2].address % sizeof(double))
            return KVO_E_ALIGNMENT;
    }
    return (address_bits(sides->raw, sides->raw_count) | address_bits(sides->stored, 1)) % 2 ? KVO_E_ALIGNMENT : KVO_OK;
}

static int32_t check_lengths(const Entry *entry)
{
    const KvoDescriptor *asked = &entry->asked;
    uint64_t source_bytes = bytes_of(sources_of(entry), asked->source_count);
    uint64_t target_bytes = bytes_of(targets_of(entry), asked->target_count);
    int is_hashed = asked->steps & (KVO_STEP_DIGEST | KVO_STEP_VERIFY);
    if (asked->codec == KVO_CODEC_NONE && (asked->steps & KVO_STEP_COPY) && source_bytes != target_bytes)
        return defect == DEFECT_WRONG_ERROR ? KVO_E_INVALID : KVO_E_LENGTH;
    uint64_t hashed_bytes = source_bytes;
    if ((asked->steps & KVO_STEP_DECODE) && (asked->steps & KVO_STEP_DIGEST))
        hashed_bytes = (asked->steps & KVO_STEP_VERIFY) && source_bytes < target_bytes ? source_bytes : target_bytes;
    return is_hashed && hashed_bytes < HASHED_FROM_BYTES ? KVO_E_LENGTH : KVO_OK;
}

static int32_t check(KvoDevice *device, const Entry *entry)
{
    const KvoDescriptor *asked = &entry->asked;
    const KvoSegment *sources = sources_of(entry), *targets = targets_of(entry);
    if (asked->codec > KVO_CODEC_MIX)
        return KVO_E_UNSUPPORTED;
    if (!have_steps(asked) || !have_seeds(asked) || asked->zero || asked->zero2 || asked->parameters.zero ||
        (asked->flags & ~(uint32_t)(KVO_FLAG_FENCE | KVO_FLAG_STREAM)) || asked->urgency > KVO_URGENCY_WAITED_FOR ||
        asked->reuse > KVO_REUSE_OFTEN || !have_counts(asked))
        return KVO_E_INVALID;
    int32_t status = check_segments(sources, asked->source_count);
    if (status == KVO_OK)
        status = check_segments(targets, asked->target_count);
    if (status == KVO_OK)
        status = check_lengths(entry);
    if (status == KVO_OK && asked->codec != KVO_CODEC_NONE) {
        Sides sides = sides_of(entry);
        status = asked->codec == KVO_CODEC_NARROW ? check_narrow(&asked->parameters, &sides)
                 : asked->codec == KVO_CODEC_PACK ? check_pack(&asked->parameters, &sides)
                                                  : check_mix(&asked->parameters, &sides);
    }
    for (uint32_t t = 0; t < asked->target_count && status == KVO_OK; t++) {
        for (uint32_t s = 0; s < asked->source_count; s++)
            if (overlap(&targets[t], &sources[s]))
                status = KVO_E_OVERLAP;
        for (uint32_t other = 0; other < t; other++)
            if (overlap(&targets[t], &targets[other]))
                status = KVO_E_OVERLAP;
    }
    return status == KVO_OK ? use_memory(device, entry, 1) : status;
}

/* The work itself. */

static void *at(const KvoSegment *segment) { return (void *)(uintptr_t)segment->address; }

static void gather(uint8_t *into, const KvoSegment *from, uint32_t count)
{
    for (uint32_t i = 0; i < count; into += from[i++].size_bytes)
        if (from[i].size_bytes)
            memcpy(into, at(&from[i]), from[i].size_bytes);
}

static void scatter(const KvoSegment *into, uint32_t count, const uint8_t *from)
{
    for (uint32_t i = 0; i < count; from += into[i++].size_bytes)
        if (into[i].size_bytes)
            memcpy(at(&into[i]), from, into[i].size_bytes);
}

static void clear(const KvoSegment *segments, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (segments[i].size_bytes)
            memset(at(&segments[i]), 0, segments[i].size_bytes);
}

/* Digests of one reading of the sources, which goes to `into` where that is not NULL. `room` is for many sources. */
static void read_once(const Kernels *kernels, uint8_t *into, const KvoSegment *from, uint32_t count, uint64_t bytes,
                      const KvoDescriptor *asked, uint32_t seeds, uint8_t *room, uint8_t *digests)
{
    const uint8_t *source = at(&from[0]);
    if (count > 1) {
        gather(room, from, count);
        source = room;
    }
    int is_streamed = into != NULL && (asked->flags & KVO_FLAG_STREAM) && bytes >= STREAM_FROM_BYTES;
    if (defect == DEFECT_READ_TWICE && into != NULL) {
        memcpy(into, source, bytes);
        into = NULL;
        is_streamed = 0;
    }
    if (into == NULL && seeds == 1)
        kernels->digest(source, bytes, asked->seeds[0], digests);
    else
        kernels->copy_digests(into, source, bytes, asked->seeds, (int)seeds, is_streamed, digests);
}

static int32_t verify(const KvoDescriptor *asked, const KvoCompletion *done)
{
    if (!(asked->steps & KVO_STEP_VERIFY) || defect == DEFECT_UNVERIFIED)
        return KVO_OK;
    return memcmp(done->digests[0], asked->expected, KVO_DIGEST_BYTES) == 0 ? KVO_OK : KVO_E_MISMATCH;
}

static void scatter_between(const Kernels *kernels, const Entry *entry, uint64_t bytes)
{
    const KvoDescriptor *asked = &entry->asked;
    const KvoSegment *source = sources_of(entry), *target = targets_of(entry);
    if (asked->source_count == 1 && asked->target_count == 1 && (asked->flags & KVO_FLAG_STREAM) &&
        bytes >= STREAM_FROM_BYTES) {
        kernels->copy(at(target), at(source), bytes);
        return;
    }
    for (uint64_t from = 0, to = 0, left = bytes; left > 0;) {
        uint64_t here = source->size_bytes - from < target->size_bytes - to ? source->size_bytes - from
                                                                            : target->size_bytes - to;
        if (here)
            memcpy((uint8_t *)at(target) + to, (const uint8_t *)at(source) + from, here);
        left -= here;
        if ((from += here) == source->size_bytes)
            source++, from = 0;
        if ((to += here) == target->size_bytes)
            target++, to = 0;
    }
}

static int32_t move(const Kernels *kernels, const Entry *entry, KvoCompletion *done)
{
    const KvoDescriptor *asked = &entry->asked;
    const KvoSegment *sources = sources_of(entry), *targets = targets_of(entry);
    uint64_t bytes = bytes_of(sources, asked->source_count);
    if (!(asked->steps & (KVO_STEP_DIGEST | KVO_STEP_VERIFY))) {
        scatter_between(kernels, entry, bytes);
        done->filled_bytes = bytes;
        return KVO_OK;
    }
    int is_copied = (asked->steps & KVO_STEP_COPY) != 0, is_gathered = asked->source_count > 1;
    int is_scattered = is_copied && asked->target_count > 1;
    uint8_t *room = is_gathered || is_scattered ? malloc(bytes) : NULL;
    if ((is_gathered || is_scattered) && room == NULL)
        return KVO_E_DEVICE;
    uint8_t *into = !is_copied || (is_gathered && is_scattered) ? NULL : is_scattered ? room : at(&targets[0]);
    read_once(kernels, into, sources, asked->source_count, bytes, asked, asked->seed_count, room, done->digests[0]);
    int32_t status = verify(asked, done);
    if (is_scattered && status == KVO_OK)
        scatter(targets, asked->target_count, room);
    if (is_copied && status != KVO_OK)
        clear(targets, asked->target_count);
    free(room);
    done->filled_bytes = is_copied && status == KVO_OK ? bytes : 0;
    return status;
}

static int32_t encode(const Kernels *kernels, const KvoDescriptor *asked, const Sides *sides, const uint8_t *raw,
                      KvoCompletion *done)
{
    const KvoParameters *p = &asked->parameters;
    if (asked->codec == KVO_CODEC_NARROW) {
        done->filled_bytes = kernels->narrow(at(&sides->stored[0]), raw, sides->raw_bytes, (int)p->element_bytes,
                                             (int)p->width);
    } else if (asked->codec == KVO_CODEC_MIX) {
        Mixing mixing = mixing_of(p);
        done->filled_bytes = kernels->mix(at(&sides->stored[0]), (const uint16_t *)(const void *)raw, &mixing,
                                          at(&sides->stored[1]), at(&sides->stored[2]));
    } else {
        Grid grid = grid_of(p, sides->raw_bytes);
        if (!kernels->pack(&grid, at(&sides->stored[0]), at(&sides->stored[1]), (const uint16_t *)(const void *)raw))
            return KVO_E_RANGE;
        done->filled_bytes = sides->stored[0].size_bytes;
    }
    return KVO_OK;
}

/* `stored` is the first segment of the stored side, and `scales` the second one of PACK, or what was read of them. */
static int32_t decode(const Kernels *kernels, const KvoDescriptor *asked, const Sides *sides, uint8_t *raw,
                      const uint8_t *stored, const uint8_t *scales, KvoCompletion *done)
{
    const KvoParameters *p = &asked->parameters;
    uint16_t *elements = (uint16_t *)(void *)raw;
    int is_whole = 1;
    if (asked->codec == KVO_CODEC_NARROW) {
        is_whole = kernels->widen(raw, sides->raw_bytes, stored, sides->stored[0].size_bytes, (int)p->element_bytes,
                                  (int)p->width);
    } else if (asked->codec == KVO_CODEC_MIX) {
        Mixing mixing = mixing_of(p);
        is_whole = kernels->unmix(elements, stored, sides->stored[0].size_bytes, &mixing);
    } else {
        Grid grid = grid_of(p, sides->raw_bytes);
        kernels->unpack(&grid, elements, stored, (const uint16_t *)(const void *)scales);
    }
    done->filled_bytes = is_whole ? sides->raw_bytes : 0;
    return is_whole ? KVO_OK : KVO_E_CORRUPT;
}

/* What is digested as well is read once, and coded from what was read. */
static int32_t encode_once(const Kernels *kernels, const KvoDescriptor *asked, const Sides *sides, KvoCompletion *done)
{
    int is_digested = (asked->steps & KVO_STEP_DIGEST) != 0;
    if (!is_digested && sides->raw_count == 1)
        return encode(kernels, asked, sides, at(&sides->raw[0]), done);
    uint8_t *room = malloc(sides->raw_bytes + 1);
    if (room == NULL)
        return KVO_E_DEVICE;
    gather(room, sides->raw, sides->raw_count);
    if (is_digested)
        kernels->copy_digests(NULL, room, sides->raw_bytes, asked->seeds, (int)asked->seed_count, 0, done->digests[0]);
    int32_t status = encode(kernels, asked, sides, room, done);
    free(room);
    return status;
}

static int32_t decode_into(const Kernels *kernels, const KvoDescriptor *asked, const Sides *sides, uint8_t *raw,
                           KvoCompletion *done)
{
    const KvoSegment *scales = &sides->stored[sides->stored_count - 1];
    if (!(asked->steps & KVO_STEP_VERIFY))
        return decode(kernels, asked, sides, raw, at(&sides->stored[0]), at(scales), done);
    uint64_t bytes = bytes_of(sides->stored, sides->stored_count), first_bytes = sides->stored[0].size_bytes;
    uint8_t *room = malloc(bytes + 1);
    if (room == NULL)
        return KVO_E_DEVICE;
    gather(room, sides->stored, sides->stored_count);
    kernels->digest(room, bytes, asked->seeds[0], done->digests[0]);
    int32_t status = verify(asked, done);
    uint64_t odd = first_bytes % 2;
    if (odd && sides->stored_count > 1) /* Scales have to be at an even address. */
        memmove(room + first_bytes + odd, room + first_bytes, scales->size_bytes);
    if (status == KVO_OK)
        status = decode(kernels, asked, sides, raw, room, room + first_bytes + odd, done);
    free(room);
    return status;
}

static int32_t decode_once(const Kernels *kernels, const KvoDescriptor *asked, const Sides *sides, KvoCompletion *done)
{
    uint32_t is_verified = (asked->steps & KVO_STEP_VERIFY) != 0;
    uint8_t *room = sides->raw_count > 1 ? malloc(sides->raw_bytes + 1) : NULL;
    if (sides->raw_count > 1 && room == NULL)
        return KVO_E_DEVICE;
    uint8_t *raw = room != NULL ? room : at(&sides->raw[0]);
    int32_t status = decode_into(kernels, asked, sides, raw, done);
    if (status == KVO_OK && (asked->steps & KVO_STEP_DIGEST))
        kernels->copy_digests(NULL, raw, sides->raw_bytes, asked->seeds + is_verified,
                              (int)(asked->seed_count - is_verified), 0, done->digests[is_verified]);
    if (status == KVO_OK && room != NULL)
        scatter(sides->raw, sides->raw_count, room);
    if (status != KVO_OK)
        clear(sides->raw, sides->raw_count);
    free(room);
    return status;
}

static int32_t code(const Kernels *kernels, const Entry *entry, KvoCompletion *done)
{
    Sides sides = sides_of(entry);
    return sides.is_encoded ? encode_once(kernels, &entry->asked, &sides, done)
                            : decode_once(kernels, &entry->asked, &sides, done);
}

/* Fingerprints: open addressing, half of the slots at most in use. */

static size_t slot_of(const KvoDevice *device, uint64_t scope, const uint8_t *fingerprint)
{
    uint64_t key;
    memcpy(&key, fingerprint, sizeof key);
    if (defect == DEFECT_SCOPES_MIXED)
        scope = 0;
    return (size_t)((key ^ scope * 0x9E3779B97F4A7C15u) & (device->room - 1));
}

static Fingerprint *find(KvoDevice *device, uint64_t scope, const uint8_t *fingerprint, Fingerprint **place)
{
    *place = NULL;
    for (size_t i = device->room ? slot_of(device, scope, fingerprint) : 0, n = 0; n < device->room;
         i = (i + 1) & (device->room - 1), n++) {
        Fingerprint *one = &device->table[i];
        if (one->state != SLOT_HELD && *place == NULL)
            *place = one;
        if (one->state == SLOT_FREE)
            return NULL;
        if (one->state == SLOT_HELD && (one->scope == scope || defect == DEFECT_SCOPES_MIXED) &&
            memcmp(one->fingerprint, fingerprint, KVO_DIGEST_BYTES) == 0)
            return one;
    }
    return NULL;
}

/* Makes room for one more; the table that is left when it cannot is the old one. */
static int grow(KvoDevice *device)
{
    if (2 * (device->used + 1) <= device->room)
        return 1;
    size_t room = 1024;
    while (room < 4 * (device->held + 1))
        room *= 2;
    Fingerprint *old = device->table, *made = calloc(room, sizeof *made);
    size_t old_room = device->room;
    if (made == NULL)
        return 0;
    device->table = made;
    device->room = room;
    device->used = device->held;
    for (size_t i = 0; i < old_room; i++)
        if (old[i].state == SLOT_HELD) {
            Fingerprint *place;
            find(device, old[i].scope, old[i].fingerprint, &place);
            *place = old[i];
        }
    free(old);
    return 1;
}

static int32_t deduplicate(KvoDevice *device, const Entry *entry, KvoCompletion *done)
{
    const KvoDescriptor *asked = &entry->asked;
    const uint8_t *fingerprint = asked->fingerprint;
    if (asked->steps & KVO_STEP_DIGEST) {
        int32_t status = move(device->kernels, entry, done);
        if (status != KVO_OK)
            return status;
        fingerprint = done->digests[0];
    }
    Fingerprint *place, *found;
    int32_t status = KVO_OK;
    pthread_mutex_lock(&device->lock);
    found = find(device, asked->scope, fingerprint, &place);
    done->is_found = found != NULL;
    done->value = found != NULL ? found->value : 0;
    if ((asked->steps & KVO_STEP_REMOVE) && found != NULL) {
        found->state = SLOT_GONE;
        device->held--;
    } else if ((asked->steps & KVO_STEP_INSERT) && found == NULL) {
        if (device->held >= FINGERPRINTS_MAX || !grow(device)) {
            status = KVO_E_FULL;
        } else {
            find(device, asked->scope, fingerprint, &place);
            device->used += place->state == SLOT_FREE;
            device->held++;
            *place = (Fingerprint){.scope = asked->scope, .value = asked->value, .state = SLOT_HELD};
            memcpy(place->fingerprint, fingerprint, KVO_DIGEST_BYTES);
        }
    }
    pthread_mutex_unlock(&device->lock);
    return status;
}

static int32_t prefetch(const Entry *entry)
{
    const KvoDescriptor *asked = &entry->asked;
    if (asked->deadline_ns && now_ns() > asked->deadline_ns)
        return KVO_E_LATE;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (uint32_t i = 0; i < asked->source_count; i++) {
        uintptr_t from = (uintptr_t)sources_of(entry)[i].address / page * page;
        uintptr_t end = (uintptr_t)(sources_of(entry)[i].address + sources_of(entry)[i].size_bytes);
        if (end > from)
            madvise((void *)from, end - from, MADV_WILLNEED); /* A hint; what the kernel refuses is no failure. */
    }
    return KVO_OK;
}

static void count_work(KvoDevice *device, const Entry *entry, const KvoCompletion *done)
{
    atomic_fetch_add_explicit(&device->descriptors, 1, memory_order_relaxed);
    if (done->status == KVO_E_CANCELLED) {
        atomic_fetch_add_explicit(&device->cancelled, 1, memory_order_relaxed);
        return;
    }
    if (done->status != KVO_OK)
        atomic_fetch_add_explicit(&device->failures, 1, memory_order_relaxed);
    else
        atomic_fetch_add_explicit(&device->source_bytes, bytes_of(sources_of(entry), entry->asked.source_count),
                                  memory_order_relaxed);
    atomic_fetch_add_explicit(&device->target_bytes, done->filled_bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&device->busy_ns, done->served_ns, memory_order_relaxed);
}

static void work(KvoDevice *device, const Entry *entry, KvoCompletion *done)
{
    const KvoDescriptor *asked = &entry->asked;
    uint64_t began_ns = now_ns();
    *done = (KvoCompletion){.abi_version = KVO_ABI_VERSION, .size_bytes = sizeof *done, .tag = asked->tag,
                            .status = entry->status, .waited_ns = began_ns - entry->submitted_ns};
    if (entry->state == ENTRY_CANCELLED) {
        if (entry->status == KVO_OK)
            use_memory(device, entry, 0);
        done->status = KVO_E_CANCELLED;
    } else if (entry->status == KVO_OK) {
        uint32_t steps = asked->steps;
        if (steps & (KVO_STEP_LOOKUP | KVO_STEP_INSERT | KVO_STEP_REMOVE))
            done->status = deduplicate(device, entry, done);
        else if (steps & KVO_STEP_PREFETCH)
            done->status = prefetch(entry);
        else if (asked->codec != KVO_CODEC_NONE)
            done->status = code(device->kernels, entry, done);
        else
            done->status = move(device->kernels, entry, done);
        use_memory(device, entry, 0);
        if (done->status != KVO_OK)
            done->filled_bytes = 0;
        if (defect == DEFECT_DIGEST_TAIL && (steps & KVO_STEP_DIGEST))
            done->digests[0][KVO_DIGEST_BYTES - 1] ^= 1;
        if (defect == DEFECT_BYTE_TOO_MANY && (steps & KVO_STEP_DECODE) && done->status == KVO_OK)
            ((uint8_t *)at(targets_of(entry)))[targets_of(entry)->size_bytes] ^= 0xFF;
    }
    done->served_ns = now_ns() - began_ns;
    count_work(device, entry, done);
}

/* Queues. */

static int32_t queue_create(KvoDevice *device, uint32_t depth, KvoQueue **queue)
{
    if (device == NULL || queue == NULL || depth == 0)
        return KVO_E_INVALID;
    *queue = NULL;
    if (depth > DEPTH_MAX)
        return KVO_E_LIMIT;
    KvoQueue *made = calloc(1, sizeof *made + depth * sizeof *made->entries);
    if (made == NULL)
        return KVO_E_DEVICE;
    pthread_mutex_lock(&device->lock);
    int is_made = device->queues < QUEUES_MAX;
    device->queues += (uint32_t)is_made;
    pthread_mutex_unlock(&device->lock);
    if (!is_made) {
        free(made);
        return KVO_E_LIMIT;
    }
    made->device = device;
    made->depth = depth;
    *queue = made;
    return KVO_OK;
}

static Entry *entry_at(KvoQueue *queue, uint32_t place)
{
    uint32_t at_place = queue->first + place;
    return &queue->entries[at_place >= queue->depth ? at_place - queue->depth : at_place];
}

static int32_t queue_destroy(KvoQueue *queue)
{
    if (queue == NULL)
        return KVO_E_INVALID;
    KvoDevice *device = queue->device;
    for (uint32_t i = 0; i < queue->count; i++) {
        Entry *entry = entry_at(queue, i);
        if (entry->state != ENTRY_FREE && entry->status == KVO_OK)
            use_memory(device, entry, 0);
    }
    free(queue);
    pthread_mutex_lock(&device->lock);
    device->queues--;
    pthread_mutex_unlock(&device->lock);
    return KVO_OK;
}

/* Reads a descriptor and its segments, as far as both sides have them. */
static void take(KvoQueue *queue, const KvoDescriptor *asked, Entry *entry)
{
    uint32_t head[2];
    memcpy(head, asked, sizeof head);
    entry->state = ENTRY_WAITS;
    entry->submitted_ns = now_ns();
    memset(&entry->asked, 0, sizeof entry->asked);
    if (!is_our_major(head[0]) || head[1] < sizeof *asked) {
        entry->status = KVO_E_VERSION;
        if (head[1] >= offsetof(KvoDescriptor, steps))
            entry->asked.tag = asked->tag;
        return;
    }
    entry->asked = *asked;
    uint32_t sources = asked->source_count, targets = asked->target_count;
    if (sources > SEGMENTS_MAX || targets > SEGMENTS_MAX) {
        entry->status = KVO_E_LIMIT;
        return;
    }
    if ((sources && asked->sources == NULL) || (targets && asked->targets == NULL)) {
        entry->status = KVO_E_INVALID;
        return;
    }
    if (sources)
        memcpy(entry->segments, asked->sources, sources * sizeof *entry->segments);
    if (targets)
        memcpy(entry->segments + SEGMENTS_MAX, asked->targets, targets * sizeof *entry->segments);
    entry->status = check(queue->device, entry);
}

static int32_t submit(KvoQueue *queue, const KvoDescriptor *batch, uint32_t count, uint32_t *accepted)
{
    if (queue == NULL || accepted == NULL || (count && batch == NULL))
        return KVO_E_INVALID;
    *accepted = 0;
    if (count > DEPTH_MAX)
        return KVO_E_LIMIT;
    for (; *accepted < count && queue->count < queue->depth; ++*accepted) {
        queue->count++;
        take(queue, batch, entry_at(queue, queue->count - 1));
        /* Descriptors of a newer minor version are longer. */
        uint32_t step = batch->size_bytes > sizeof *batch && is_our_major(batch->abi_version) ? batch->size_bytes
                                                                                             : sizeof *batch;
        batch = (const KvoDescriptor *)(const void *)((const char *)batch + step);
    }
    return *accepted < count ? KVO_E_FULL : KVO_OK;
}

/* Makes room where the oldest ones have ended. */
static void trim(KvoQueue *queue)
{
    while (queue->count && entry_at(queue, 0)->state == ENTRY_FREE) {
        queue->first = queue->first + 1 == queue->depth ? 0 : queue->first + 1;
        queue->count--;
    }
}

/* The most urgent of those that may begin: none behind a fence while something before it is left. */
static Entry *next_of(KvoQueue *queue)
{
    Entry *best = NULL;
    for (uint32_t i = 0; i < queue->count; i++) {
        Entry *entry = entry_at(queue, i);
        int is_fence = (entry->asked.flags & KVO_FLAG_FENCE) != 0;
        if (entry->state != ENTRY_FREE && (!is_fence || i == 0 || defect == DEFECT_FENCE_IGNORED) &&
            (best == NULL || entry->asked.priority > best->asked.priority))
            best = entry;
        if (is_fence && defect != DEFECT_FENCE_IGNORED)
            break;
    }
    return best;
}

static int32_t poll_queue(KvoQueue *queue, KvoCompletion *completions, uint32_t most, uint64_t timeout_ns,
                          uint32_t *count)
{
    (void)timeout_ns; /* Whatever there is to wait for is done here. */
    if (queue == NULL || count == NULL || (most && completions == NULL))
        return KVO_E_INVALID;
    *count = 0;
    char *into = (char *)completions;
    while (*count < most) {
        KvoCompletion done;
        uint32_t head[2];
        memcpy(head, into, sizeof head);
        if (!is_our_major(head[0]) || head[1] < sizeof done)
            return *count ? KVO_OK : KVO_E_VERSION;
        Entry *entry = next_of(queue);
        if (entry == NULL)
            break;
        work(queue->device, entry, &done);
        entry->state = ENTRY_FREE;
        trim(queue);
        if (defect == DEFECT_LOST_COMPLETION && entry->asked.tag % 7 == 6)
            continue;
        give(into, &done, sizeof done, sizeof done);
        into += head[1];
        ++*count;
    }
    return KVO_OK;
}

static int32_t cancel(KvoQueue *queue, uint64_t tag)
{
    if (queue == NULL)
        return KVO_E_INVALID;
    for (uint32_t i = 0; i < queue->count; i++) {
        Entry *entry = entry_at(queue, i);
        if (entry->state == ENTRY_WAITS && entry->asked.tag == tag) {
            entry->state = ENTRY_CANCELLED;
            return KVO_OK;
        }
    }
    return KVO_E_NOT_FOUND;
}

const KvoApi *kvstrata_offload_api(uint32_t host_abi_version)
{
    static const KvoApi api = {
        .abi_version = KVO_ABI_VERSION, .size_bytes = sizeof api, .open = open_device, .close = close_device,
        .describe = describe, .count = count_device, .register_memory = register_memory,
        .unregister_memory = unregister_memory, .queue_create = queue_create, .queue_destroy = queue_destroy,
        .submit = submit, .poll = poll_queue, .cancel = cancel,
    };
    (void)host_abi_version;
    return &api;
}
