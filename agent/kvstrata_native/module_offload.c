/* Kernels that go through the offload interface: what the module's functions call while an engine is attached.

   Blocks of `from_bytes` and more are the engine's; less is done before a descriptor is written. One descriptor at a time, in a queue that no other thread has meanwhile. Whatever the engine does not do, refuses or
   fails at, the kernels of this processor do: faults cost time, never bytes. An engine that is silent for PATIENCE_NS is
   lost, and nothing more is asked of it. Of FAR_BETWEEN digests one is made again by this processor: an engine that
   disagrees is lost as well. */
#define _DEFAULT_SOURCE /* clock_gettime. */
#include "module.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h> /* Python.h has it no longer where the API is limited. */
#include <string.h>
#include <time.h>

#include "levels.h"
#include "offload.h"

#define PATIENCE_NS 10000000000u
#define POLL_NS 1000000000u
#define FAR_BETWEEN 1024
enum { QUEUES_MAX = 64, QUEUE_DEPTH = 2, WHY_BYTES = 160 };

enum { ENGINE_NONE, ENGINE_READY, ENGINE_LOST };

typedef struct {
    const KvoApi *api;
    KvoDevice *device;
    void *library;
    uint64_t from_bytes;
    KvoDescription is;
    KvoQueue *idle[QUEUES_MAX];
    uint32_t idle_count, made, busy;
    int state;
    const char *why_lost;
    pthread_mutex_t lock; /* Of all above, once attached. */
    atomic_ullong descriptors, fallbacks, bytes, digests;
} Engine;

static Engine engine = {.lock = PTHREAD_MUTEX_INITIALIZER};
static const Kernels *processor; /* What does the rest. */
static const Kernels kernels_offload;

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void lose(const char *why)
{
    pthread_mutex_lock(&engine.lock);
    if (engine.state == ENGINE_READY) {
        engine.state = ENGINE_LOST;
        engine.why_lost = why;
        chosen = processor;
    }
    pthread_mutex_unlock(&engine.lock);
}

/* NULL when all are in use, or no engine is there. */
static KvoQueue *take_queue(void)
{
    KvoQueue *queue = NULL;
    pthread_mutex_lock(&engine.lock);
    if (engine.state == ENGINE_READY && engine.idle_count)
        queue = engine.idle[--engine.idle_count];
    else if (engine.state == ENGINE_READY && engine.made < QUEUES_MAX && engine.made < engine.is.queues_max &&
             engine.api->queue_create(engine.device, QUEUE_DEPTH, &queue) == KVO_OK && queue != NULL)
        engine.made++;
    engine.busy += queue != NULL;
    pthread_mutex_unlock(&engine.lock);
    return queue;
}

static void give_queue(KvoQueue *queue)
{
    pthread_mutex_lock(&engine.lock);
    engine.idle[engine.idle_count++] = queue;
    engine.busy--;
    pthread_mutex_unlock(&engine.lock);
}

static void drop_queue(KvoQueue *queue)
{
    engine.api->queue_destroy(queue); /* Returns when the engine writes no more. */
    pthread_mutex_lock(&engine.lock);
    engine.made--;
    engine.busy--;
    pthread_mutex_unlock(&engine.lock);
}

static int waited_for(KvoQueue *queue, uint64_t tag, KvoCompletion *done)
{
    for (uint64_t until_ns = 0;;) {
        uint32_t count = 0;
        if (engine.api->poll(queue, done, 1, POLL_NS, &count) != KVO_OK)
            return 0;
        if (count)
            return count == 1 && done->tag == tag;
        if (until_ns == 0) /* Most are done by now, and no clock was read for them. */
            until_ns = now_ns() + PATIENCE_NS;
        else if (now_ns() > until_ns)
            return 0;
    }
}

static int is_aligned(const KvoSegment *segments, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (segments[i].address & (engine.is.alignment_bytes - 1))
            return 0;
    return 1;
}

/* Status of one descriptor: KVO_E_DEVICE, and nothing under way any more, where the processor has to do it. */
static int32_t ask(KvoDescriptor *asked, uint32_t needs, const KvoSegment *sources, uint32_t source_count,
                   const KvoSegment *targets, uint32_t target_count, KvoCompletion *done)
{
    KvoQueue *queue = NULL;
    if (sources[0].size_bytes < engine.from_bytes)
        return KVO_E_DEVICE;
    if ((engine.is.capabilities & needs) == needs && is_aligned(sources, source_count) &&
        is_aligned(targets, target_count) && sources[0].size_bytes <= engine.is.bytes_max)
        queue = take_queue();
    if (queue == NULL) {
        atomic_fetch_add_explicit(&engine.fallbacks, 1, memory_order_relaxed);
        return KVO_E_DEVICE;
    }
    uint32_t accepted = 0;
    asked->abi_version = KVO_ABI_VERSION;
    asked->size_bytes = sizeof *asked;
    asked->tag = (uint64_t)(uintptr_t)done;
    asked->sources = sources;
    asked->targets = targets;
    asked->source_count = source_count;
    asked->target_count = target_count;
    asked->urgency = KVO_URGENCY_WAITED_FOR;
    *done = (KvoCompletion){.abi_version = KVO_ABI_VERSION, .size_bytes = sizeof *done};
    int32_t status = engine.api->submit(queue, asked, 1, &accepted);
    if (status == KVO_OK && accepted == 1 && waited_for(queue, asked->tag, done)) {
        give_queue(queue);
        status = done->status;
    } else {
        int is_silent = status == KVO_OK && accepted == 1;
        drop_queue(queue);
        if (is_silent)
            lose("it did not complete what it had accepted");
        status = KVO_E_DEVICE;
    }
    uint64_t room_bytes = target_count ? targets[0].size_bytes : 0;
    if (status == KVO_OK && done->filled_bytes > room_bytes) {
        lose("it filled more than there was room for");
        status = KVO_E_DEVICE;
    }
    int is_done = status == KVO_OK || status == KVO_E_CORRUPT || status == KVO_E_RANGE;
    atomic_fetch_add_explicit(is_done ? &engine.descriptors : &engine.fallbacks, 1, memory_order_relaxed);
    if (status == KVO_OK)
        atomic_fetch_add_explicit(&engine.bytes, sources[0].size_bytes, memory_order_relaxed);
    return is_done ? status : KVO_E_DEVICE;
}

static KvoSegment segment(const void *memory, size_t size)
{
    return (KvoSegment){.address = (uintptr_t)memory, .size_bytes = size};
}

/* Whether a digest may be taken as it is; the first one, and some later ones, this processor makes again of what was
   written. */
static int is_trusted(const uint8_t *of, size_t size, uint64_t seed, const uint8_t *digest)
{
    uint8_t again[DIGEST_BYTES];
    if (of == NULL || atomic_fetch_add_explicit(&engine.digests, 1, memory_order_relaxed) % FAR_BETWEEN != 0)
        return 1;
    processor->digest(of, size, seed, again);
    return memcmp(again, digest, DIGEST_BYTES) == 0;
}

static void copy(uint8_t *into, const uint8_t *source, size_t size)
{
    KvoSegment from = segment(source, size), to = segment(into, size);
    KvoDescriptor asked = {.steps = KVO_STEP_COPY, .flags = KVO_FLAG_STREAM};
    KvoCompletion done;
    if (ask(&asked, KVO_CAP_COPY, &from, 1, &to, 1, &done) != KVO_OK)
        processor->copy(into, source, size);
}

static void digest(const uint8_t *source, size_t size, uint64_t seed, uint8_t *into)
{
    KvoSegment from = segment(source, size);
    KvoDescriptor asked = {.steps = KVO_STEP_DIGEST, .seeds = {seed}, .seed_count = 1};
    KvoCompletion done;
    if (ask(&asked, KVO_CAP_DIGEST, &from, 1, NULL, 0, &done) == KVO_OK)
        memcpy(into, done.digests[0], DIGEST_BYTES);
    else
        processor->digest(source, size, seed, into);
}

/* Copied memory may be others' to write by now; the target is the caller's alone, and tells what was read. */
static void copy_digests(uint8_t *into, const uint8_t *source, size_t size, const uint64_t *seeds, int count,
                         int is_streamed, uint8_t *digests)
{
    KvoSegment from = segment(source, size), to = segment(into, size);
    KvoDescriptor asked = {.steps = into == NULL ? KVO_STEP_DIGEST : KVO_STEP_COPY | KVO_STEP_DIGEST,
                           .flags = is_streamed ? KVO_FLAG_STREAM : 0, .seed_count = (uint32_t)count};
    KvoCompletion done;
    memcpy(asked.seeds, seeds, (size_t)count * sizeof *seeds);
    uint32_t needs = into == NULL ? KVO_CAP_DIGEST : KVO_CAP_COPY | KVO_CAP_DIGEST;
    int32_t status = ask(&asked, needs, &from, 1, &to, into != NULL, &done);
    if (status == KVO_OK && !is_trusted(into, size, seeds[0], done.digests[0])) {
        lose("a digest of its is not that of what it wrote");
        status = KVO_E_DEVICE;
    }
    if (status == KVO_OK)
        memcpy(digests, done.digests, (size_t)count * DIGEST_BYTES);
    else
        processor->copy_digests(into, source, size, seeds, count, is_streamed, digests);
}

static int width_of(const uint8_t *source, size_t size, int element_bytes)
{
    return processor->width_of(source, size, element_bytes); /* Looks at a few strips. */
}

static KvoParameters of_narrow(int element_bytes, int width)
{
    return (KvoParameters){.element_bytes = (uint32_t)element_bytes, .width = (uint32_t)width};
}

/* The module has made sure of the room that `narrow` and `mix` may need, and knows no more of it. */
static size_t narrow(uint8_t *into, const uint8_t *source, size_t size, int element_bytes, int width)
{
    size_t room = size + 2 * (size / ((size_t)element_bytes * STRIP_BYTES));
    KvoSegment from = segment(source, size), to = segment(into, room);
    KvoDescriptor asked = {.steps = KVO_STEP_ENCODE, .codec = KVO_CODEC_NARROW,
                           .parameters = of_narrow(element_bytes, width)};
    KvoCompletion done;
    if (ask(&asked, KVO_CAP_NARROW, &from, 1, &to, 1, &done) == KVO_OK)
        return (size_t)done.filled_bytes;
    return processor->narrow(into, source, size, element_bytes, width);
}

static int widen(uint8_t *into, size_t size, const uint8_t *stored, size_t stored_bytes, int element_bytes, int width)
{
    KvoSegment from = segment(stored, stored_bytes), to = segment(into, size);
    KvoDescriptor asked = {.steps = KVO_STEP_DECODE, .codec = KVO_CODEC_NARROW,
                           .parameters = of_narrow(element_bytes, width)};
    KvoCompletion done;
    int32_t status = ask(&asked, KVO_CAP_NARROW, &from, 1, &to, 1, &done);
    if (status == KVO_OK || status == KVO_E_CORRUPT)
        return status == KVO_OK;
    return processor->widen(into, size, stored, stored_bytes, element_bytes, width);
}

static KvoParameters of_mix(const Mixing *mixing)
{
    return (KvoParameters){.width = (uint32_t)mixing->width, .is_rotated = mixing->is_rotated != 0,
                           .planes = mixing->planes, .rows = mixing->rows, .columns = mixing->columns,
                           .limit = mixing->limit};
}

static size_t block_bytes(const Mixing *mixing) { return 2 * mixing->planes * mixing->rows * mixing->columns; }

static size_t mix(uint8_t *into, const uint16_t *source, const Mixing *mixing, uint8_t *rungs, double *errors)
{
    size_t room = block_bytes(mixing) + HEAD_BYTES * mixing->planes + 2 * mixing->rows * mixing->columns / STRIP_BYTES;
    KvoSegment from = segment(source, block_bytes(mixing));
    KvoSegment to[] = {segment(into, room), segment(rungs, mixing->planes),
                       segment(errors, mixing->planes * sizeof(double))};
    KvoDescriptor asked = {.steps = KVO_STEP_ENCODE, .codec = KVO_CODEC_MIX, .parameters = of_mix(mixing)};
    KvoCompletion done;
    uint8_t first[4096]; /* An engine that fails half-way may have written rungs: more planes than that are not its. */
    if (mixing->planes <= sizeof first) {
        memcpy(first, rungs, mixing->planes);
        if (ask(&asked, KVO_CAP_MIX, &from, 1, to, 3, &done) == KVO_OK)
            return (size_t)done.filled_bytes;
        memcpy(rungs, first, mixing->planes);
    }
    return processor->mix(into, source, mixing, rungs, errors);
}

static int unmix(uint16_t *into, const uint8_t *stored, size_t stored_bytes, const Mixing *mixing)
{
    KvoSegment from = segment(stored, stored_bytes), to = segment(into, block_bytes(mixing));
    KvoDescriptor asked = {.steps = KVO_STEP_DECODE, .codec = KVO_CODEC_MIX, .parameters = of_mix(mixing)};
    KvoCompletion done;
    int32_t status = ask(&asked, KVO_CAP_MIX, &from, 1, &to, 1, &done);
    if (status == KVO_OK || status == KVO_E_CORRUPT)
        return status == KVO_OK;
    return processor->unmix(into, stored, stored_bytes, mixing);
}

static KvoParameters of_pack(const Grid *grid)
{
    return (KvoParameters){.kind = (uint32_t)grid->kind, .is_by_column = grid->is_by_column != 0,
                           .columns = grid->columns, .group = grid->group};
}

/* Elements, codes and scales. */
static void grid_segments(const Grid *grid, const void *x, const void *codes, const void *scales, KvoSegment *made)
{
    size_t count = grid->rows * grid->columns, per_byte = grid->kind == INT4 ? 2 : 1;
    size_t bands = grid->rows / grid->group + (grid->rows % grid->group != 0);
    size_t groups = grid->is_by_column ? bands * grid->columns : count / grid->group;
    made[0] = segment(x, 2 * count);
    made[1] = segment(codes, count / per_byte);
    made[2] = segment(scales, 2 * per_byte * groups);
}

static int pack(const Grid *grid, uint8_t *codes, uint16_t *scales, const uint16_t *x)
{
    KvoSegment sides[3];
    grid_segments(grid, x, codes, scales, sides);
    KvoDescriptor asked = {.steps = KVO_STEP_ENCODE, .codec = KVO_CODEC_PACK, .parameters = of_pack(grid)};
    KvoCompletion done;
    int32_t status = ask(&asked, KVO_CAP_PACK, sides, 1, sides + 1, 2, &done);
    if (status == KVO_OK || status == KVO_E_RANGE)
        return status == KVO_OK;
    return processor->pack(grid, codes, scales, x);
}

static void unpack(const Grid *grid, uint16_t *x, const uint8_t *codes, const uint16_t *scales)
{
    KvoSegment sides[3];
    grid_segments(grid, x, codes, scales, sides);
    KvoDescriptor asked = {.steps = KVO_STEP_DECODE, .codec = KVO_CODEC_PACK, .parameters = of_pack(grid)};
    KvoCompletion done;
    if (ask(&asked, KVO_CAP_PACK, sides + 1, 2, sides, 1, &done) != KVO_OK)
        processor->unpack(grid, x, codes, scales);
}

static int always(void) { return 1; }

static const Kernels kernels_offload = {
    .name = "offload", .is_supported = always, .copy = copy, .digest = digest, .copy_digests = copy_digests,
    .width_of = width_of, .narrow = narrow, .widen = widen, .mix = mix, .unmix = unmix, .pack = pack, .unpack = unpack,
};

/* The module's functions. They hold the GIL. */

static int is_leaving; /* Of who holds the GIL: it is let go of while the engine ends, and others may ask meanwhile. */

static void rest(void)
{
    struct timespec moment = {.tv_nsec = 100000};
    nanosleep(&moment, NULL);
}

void detach_engine(void)
{
    while (is_leaving) {
        Py_BEGIN_ALLOW_THREADS
        rest();
        Py_END_ALLOW_THREADS
    }
    if (engine.state == ENGINE_NONE)
        return;
    is_leaving = 1;
    pthread_mutex_lock(&engine.lock);
    engine.state = ENGINE_NONE;
    chosen = processor;
    pthread_mutex_unlock(&engine.lock);
    Py_BEGIN_ALLOW_THREADS
    for (uint32_t busy = 1; busy;) { /* Those of other threads end within PATIENCE_NS. */
        pthread_mutex_lock(&engine.lock);
        busy = engine.busy;
        pthread_mutex_unlock(&engine.lock);
        if (busy)
            rest();
    }
    Py_END_ALLOW_THREADS
    while (engine.idle_count)
        engine.api->queue_destroy(engine.idle[--engine.idle_count]);
    engine.api->close(engine.device);
    engine.made = 0;
    if (engine.library != NULL)
        dlclose(engine.library);
    engine.library = NULL;
    is_leaving = 0;
}

static PyObject *refuse(void *library, const char *name, const char *format, ...)
{
    char why[WHY_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why, sizeof why, format, arguments);
    va_end(arguments);
    PyErr_Format(PyExc_ValueError, "offload engine %s: %s", name, why);
    if (library != NULL)
        dlclose(library);
    return NULL;
}

static int is_sound(const KvoDescription *is)
{
    return memchr(is->name, 0, sizeof is->name) && memchr(is->version, 0, sizeof is->version) && is->queues_max &&
           is->depth_max && is->batch_max && is->segments_max >= 3 && is->alignment_bytes &&
           !(is->alignment_bytes & (is->alignment_bytes - 1)) && is->digest_bytes_min <= HASHED_FROM_BYTES;
}

static PyObject *attach(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *path, *configuration = NULL;
    unsigned long long from_bytes = 0;
    if (!PyArg_ParseTuple(args, "z|zK", &path, &configuration, &from_bytes))
        return NULL;
    const char *name = path != NULL ? path : "reference";
    void *library = path != NULL ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (path != NULL && library == NULL)
        return refuse(NULL, name, "%s", dlerror());
    const KvoApi *(*entry)(uint32_t) = kvstrata_offload_api;
    if (library != NULL) {
        void *found = dlsym(library, KVO_ENTRY);
        memcpy(&entry, &found, sizeof found);
    }
    const KvoApi *api = entry != NULL ? entry(KVO_ABI_VERSION) : NULL;
    if (api == NULL)
        return refuse(library, name, "exports no " KVO_ENTRY);
    if (api->abi_version >> 16 != KVO_ABI_MAJOR || api->size_bytes < sizeof *api)
        return refuse(library, name, "interface %u.%u of %u B; this agent has %u.%u of %zu B", api->abi_version >> 16,
                      api->abi_version & 0xFFFF, api->size_bytes, KVO_ABI_MAJOR, KVO_ABI_MINOR, sizeof *api);
    KvoDevice *device = NULL;
    KvoDescription is = {.abi_version = KVO_ABI_VERSION, .size_bytes = sizeof is};
    int32_t status = api->open(KVO_ABI_VERSION, configuration, &device);
    if (status != KVO_OK || device == NULL)
        return refuse(library, name, "open: status %d", status);
    status = api->describe(device, &is);
    if (status != KVO_OK || !is_sound(&is) || !(is.capabilities & KVO_CAP_SHARED_MEMORY)) {
        api->close(device);
        return status != KVO_OK   ? refuse(library, name, "describe: status %d", status)
               : !is_sound(&is) ? refuse(library, name, "describes itself with limits that are none")
                                  : refuse(library, name, "takes registered memory alone, and the agent has none such");
    }
    detach_engine();
    pthread_mutex_lock(&engine.lock);
    engine.api = api;
    engine.device = device;
    engine.library = library;
    engine.from_bytes = from_bytes;
    engine.is = is;
    engine.descriptors = engine.fallbacks = engine.bytes = engine.digests = 0;
    engine.why_lost = "";
    processor = chosen;
    engine.state = ENGINE_READY;
    chosen = &kernels_offload;
    pthread_mutex_unlock(&engine.lock);
    Py_RETURN_NONE;
}

static PyObject *detach(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    detach_engine();
    Py_RETURN_NONE;
}

/* A maker may have written it in any encoding. */
static PyObject *text(const char *bytes)
{
    return PyUnicode_DecodeUTF8(bytes, (Py_ssize_t)strlen(bytes), "replace");
}

static PyObject *describe(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    if (engine.state == ENGINE_NONE)
        Py_RETURN_NONE;
    return Py_BuildValue("(NNIsKKK)", text(engine.is.name), text(engine.is.version), engine.is.capabilities,
                         engine.state == ENGINE_LOST ? engine.why_lost : "", (unsigned long long)engine.descriptors,
                         (unsigned long long)engine.fallbacks, (unsigned long long)engine.bytes);
}

PyMethodDef offload_functions[] = {
    {"attach", attach, METH_VARARGS, NULL},
    {"detach", detach, METH_NOARGS, NULL},
    {"attached", describe, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
