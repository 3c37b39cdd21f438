/* Copies and digests of the module `_kernels`. */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "module.h"
#include "processor.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

/* Of x86-64 and of every aarch64 that CXL is attached to. */
#define LINE_BYTES 64u

/* From here on a copy goes past the caches: blocks of a tier never fit into them. Measured on an AMD EPYC with 1 MiB of
   L2 and 32 MiB of L3: from 16 KiB to 16 MiB it makes 18-23 GB/s of 9-12 where source and target do not fit, and
   27 of 40 where they do. */
#define STREAM_FROM_BYTES (64u << 10)

/* A thread costs some 20 us; this much takes 20 times as long to copy. */
#define THREAD_FROM_BYTES (4u << 20)
#define THREADS_MOST 16

static int have_one_size(const Py_buffer *into, const Py_buffer *source)
{
    if (into->len != source->len)
        PyErr_Format(PyExc_ValueError, "copy of %zd B into %zd B", source->len, into->len);
    return into->len == source->len;
}

static int overlap(const Py_buffer *a, const Py_buffer *b)
{
    uintptr_t at = (uintptr_t)a->buf, bt = (uintptr_t)b->buf;
    return at < bt + (size_t)b->len && bt < at + (size_t)a->len;
}

static void copy_bytes(const Py_buffer *into, const Py_buffer *source)
{
    if ((size_t)into->len < STREAM_FROM_BYTES || overlap(into, source))
        memmove(into->buf, source->buf, (size_t)into->len);
    else
        chosen->copy(into->buf, source->buf, (size_t)into->len);
}

static PyObject *copy(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer into, source;
    if (!PyArg_ParseTuple(args, "w*y*", &into, &source))
        return NULL;
    int is_sound = have_one_size(&into, &source);
    if (is_sound && (size_t)into.len >= RELEASE_FROM_BYTES) {
        Py_BEGIN_ALLOW_THREADS
        copy_bytes(&into, &source);
        Py_END_ALLOW_THREADS
    } else if (is_sound) {
        copy_bytes(&into, &source);
    }
    PyBuffer_Release(&into);
    PyBuffer_Release(&source);
    return is_sound ? Py_NewRef(Py_None) : NULL;
}

#ifdef __x86_64__
__attribute__((target("clflushopt"))) static void flush_many(const char *at, const char *end)
{
    for (; at < end; at += LINE_BYTES)
        _mm_clflushopt((void *)at);
}
#endif

static void flush_lines(const char *memory, size_t size)
{
    const char *at = (const char *)((uintptr_t)memory & ~(uintptr_t)(LINE_BYTES - 1)), *end = memory + size;
#if defined(__x86_64__)
    _mm_mfence(); /* Stores before it are in the caches, from where the lines are written back. */
    if (has_clflushopt())
        flush_many(at, end);
    else
        for (; at < end; at += LINE_BYTES)
            _mm_clflush(at);
    _mm_mfence();
#elif defined(__aarch64__)
    __asm__ volatile("dsb sy" ::: "memory");
    for (; at < end; at += LINE_BYTES)
        __asm__ volatile("dc civac, %0" ::"r"(at) : "memory");
    __asm__ volatile("dsb sy" ::: "memory");
#else
    atomic_thread_fence(memory_order_seq_cst);
    (void)at, (void)end;
#endif
}

static PyObject *flush(PyObject *Py_UNUSED(module), PyObject *argument)
{
    Py_buffer memory;
    if (PyObject_GetBuffer(argument, &memory, PyBUF_SIMPLE))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    flush_lines(memory.buf, (size_t)memory.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&memory);
    return Py_NewRef(Py_None);
}

static PyObject *digest_of_few(PyObject *bytes, unsigned long long seed)
{
    PyObject *number = bytes == NULL ? NULL : PyLong_FromUnsignedLongLong(seed);
    PyObject *made = number == NULL ? NULL : PyObject_CallFunctionObjArgs(short_digest, bytes, number, NULL);
    Py_XDECREF(number);
    Py_XDECREF(bytes);
    return made;
}

static PyObject *digest_of(const Py_buffer *source, unsigned long long seed)
{
    uint8_t digest[DIGEST_BYTES];
    if (source->len < HASHED_FROM_BYTES)
        return digest_of_few(PyBytes_FromStringAndSize(source->buf, source->len), seed);
    if (source->len < RELEASE_FROM_BYTES) {
        chosen->digest(source->buf, (size_t)source->len, seed, digest);
    } else {
        Py_BEGIN_ALLOW_THREADS
        chosen->digest(source->buf, (size_t)source->len, seed, digest);
        Py_END_ALLOW_THREADS
    }
    return PyBytes_FromStringAndSize((char *)digest, DIGEST_BYTES);
}

static PyObject *xxh3_128(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer source;
    unsigned long long seed = 0;
    if (!PyArg_ParseTuple(args, "y*|K", &source, &seed))
        return NULL;
    PyObject *made = digest_of(&source, seed);
    PyBuffer_Release(&source);
    return made;
}

/* Parses a list of blocks into `size` bytes each, does the work on all of them, and releases what was parsed. */
typedef struct {
    size_t size;
    int (*parse)(PyObject *block, void *one);
    PyObject *(*work)(void *all, Py_ssize_t count, long threads);
    void (*release)(void *one);
} Batch;

static PyObject *run_batch(PyObject *asked, const Batch *batch, long threads)
{
    PyObject *blocks = PySequence_List(asked), *made = NULL;
    Py_ssize_t count = blocks == NULL ? 0 : PyList_Size(blocks), parsed = 0;
    char *all = blocks == NULL ? NULL : PyMem_Calloc((size_t)count + 1, batch->size);
    if (blocks != NULL && all == NULL)
        PyErr_NoMemory();
    while (all != NULL && parsed < count &&
           batch->parse(PyList_GetItem(blocks, parsed), all + (size_t)parsed * batch->size))
        parsed++;
    if (all != NULL && parsed == count)
        made = batch->work(all, count, threads);
    while (parsed > 0)
        batch->release(all + (size_t)--parsed * batch->size);
    PyMem_Free(all);
    Py_XDECREF(blocks);
    return made;
}

typedef struct {
    Py_buffer source;
    unsigned long long seeds[2];
    uint8_t digests[2 * DIGEST_BYTES];
} Pair;

static void hash_pair(Pair *pair)
{
    uint64_t seeds[2] = {pair->seeds[0], pair->seeds[1]};
    if (pair->source.len >= HASHED_FROM_BYTES)
        chosen->copy_digests(NULL, pair->source.buf, (size_t)pair->source.len, seeds, 2, 0, pair->digests);
}

static PyObject *digests_of(const Pair *pair)
{
    PyObject *few, *made[2];
    if (pair->source.len >= HASHED_FROM_BYTES)
        return Py_BuildValue("(y#y#)", pair->digests, (Py_ssize_t)DIGEST_BYTES, pair->digests + DIGEST_BYTES,
                             (Py_ssize_t)DIGEST_BYTES);
    few = PyBytes_FromStringAndSize(pair->source.buf, pair->source.len);
    for (int i = 0; i < 2; i++)
        made[i] = few == NULL ? NULL : digest_of_few(Py_NewRef(few), pair->seeds[i]);
    Py_XDECREF(few);
    if (made[0] != NULL && made[1] != NULL)
        return Py_BuildValue("(NN)", made[0], made[1]);
    Py_XDECREF(made[0]);
    Py_XDECREF(made[1]);
    return NULL;
}

static PyObject *hash_pairs(void *all, Py_ssize_t count, long Py_UNUSED(threads))
{
    Pair *pairs = all;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++)
        hash_pair(&pairs[i]);
    Py_END_ALLOW_THREADS
    PyObject *made = PyList_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        PyObject *told = digests_of(&pairs[i]);
        if (told == NULL)
            Py_CLEAR(made);
        else
            PyList_SetItem(made, i, told);
    }
    return made;
}

static int parse_pair(PyObject *block, void *one)
{
    Pair *pair = one;
    if (PyTuple_Check(block))
        return PyArg_ParseTuple(block, "y*KK", &pair->source, &pair->seeds[0], &pair->seeds[1]);
    PyErr_SetString(PyExc_TypeError, "a block to hash is a tuple of memory and two seeds");
    return 0;
}

static void release_pair(void *one)
{
    PyBuffer_Release(&((Pair *)one)->source);
}

static PyObject *digest_pairs(PyObject *Py_UNUSED(module), PyObject *asked)
{
    static const Batch batch = {sizeof(Pair), parse_pair, hash_pairs, release_pair};
    return run_batch(asked, &batch, 1);
}

typedef struct {
    Pair pair;
    Py_buffer into, wanted;
} Arrival;

/* Each is copied right after it was hashed: while it lies in a cache. */
static void copy_if_sound(Arrival *one)
{
    const Py_buffer *source = &one->pair.source;
    if (source->len < HASHED_FROM_BYTES)
        return;
    hash_pair(&one->pair);
    if (memcmp(one->pair.digests, one->wanted.buf, DIGEST_BYTES) == 0)
        copy_bytes(&one->into, source);
}

static PyObject *end_of(const Arrival *one)
{
    PyObject *told = digests_of(&one->pair), *end = NULL;
    char *theirs;
    Py_ssize_t length;
    if (told == NULL || PyBytes_AsStringAndSize(PyTuple_GetItem(told, 0), &theirs, &length) != 0) {
        Py_XDECREF(told);
        return NULL;
    }
    int is_sound = memcmp(theirs, one->wanted.buf, DIGEST_BYTES) == 0;
    if (is_sound && one->pair.source.len < HASHED_FROM_BYTES)
        memmove(one->into.buf, one->pair.source.buf, (size_t)one->into.len);
    end = is_sound ? Py_NewRef(PyTuple_GetItem(told, 1)) : PyBytes_FromStringAndSize(NULL, 0);
    Py_DECREF(told);
    return end;
}

static PyObject *copy_arrivals(void *all, Py_ssize_t count, long Py_UNUSED(threads))
{
    Arrival *arrivals = all;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++)
        copy_if_sound(&arrivals[i]);
    Py_END_ALLOW_THREADS
    PyObject *made = PyList_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        PyObject *end = end_of(&arrivals[i]);
        if (end == NULL)
            Py_CLEAR(made);
        else
            PyList_SetItem(made, i, end);
    }
    return made;
}

static void release_arrival(void *released)
{
    Arrival *one = released;
    PyBuffer_Release(&one->into);
    PyBuffer_Release(&one->pair.source);
    PyBuffer_Release(&one->wanted);
}

static int parse_arrival(PyObject *block, void *parsed)
{
    Arrival *one = parsed;
    if (!PyTuple_Check(block)) {
        PyErr_SetString(PyExc_TypeError, "a block to copy is a tuple of two memories, two seeds and a digest");
        return 0;
    }
    Pair *pair = &one->pair;
    if (!PyArg_ParseTuple(block, "w*y*KKy*", &one->into, &pair->source, &pair->seeds[0], &pair->seeds[1],
                          &one->wanted))
        return 0;
    if (overlap(&one->into, &pair->source))
        PyErr_SetString(PyExc_ValueError, "copy within one memory");
    else if (one->wanted.len != DIGEST_BYTES)
        PyErr_Format(PyExc_ValueError, "digest of %zd B, not of 16 B", one->wanted.len);
    else if (have_one_size(&one->into, &pair->source))
        return 1;
    release_arrival(one);
    return 0;
}

static PyObject *copy_sound(PyObject *Py_UNUSED(module), PyObject *asked)
{
    static const Batch batch = {sizeof(Arrival), parse_arrival, copy_arrivals, release_arrival};
    return run_batch(asked, &batch, 1);
}

static PyObject *joined(PyObject *made, PyObject *other)
{
    PyObject *pair = made == NULL || other == NULL ? NULL : PyTuple_Pack(2, made, other);
    Py_XDECREF(made);
    Py_XDECREF(other);
    return pair;
}

static PyObject *copy_few(const Py_buffer *into, const Py_buffer *source, const uint64_t *seeds, int count)
{
    PyObject *read = PyBytes_FromStringAndSize(source->buf, source->len);
    if (read == NULL)
        return NULL;
    memcpy(into->buf, PyBytes_AsString(read), (size_t)into->len);
    if (count == 1)
        return digest_of_few(read, seeds[0]);
    PyObject *first = digest_of_few(Py_NewRef(read), seeds[0]);
    return joined(first, digest_of_few(read, seeds[1]));
}

static PyObject *copy_and_digest(const Py_buffer *into, const Py_buffer *source, const uint64_t *seeds, int count)
{
    uint8_t digests[DIGESTS_MOST * DIGEST_BYTES];
    size_t size = (size_t)source->len;
    if (size < HASHED_FROM_BYTES)
        return copy_few(into, source, seeds, count);
    if (size < RELEASE_FROM_BYTES) {
        chosen->copy_digests(into->buf, source->buf, size, seeds, count, 0, digests);
    } else {
        Py_BEGIN_ALLOW_THREADS
        chosen->copy_digests(into->buf, source->buf, size, seeds, count, size >= STREAM_FROM_BYTES, digests);
        Py_END_ALLOW_THREADS
    }
    PyObject *made = PyBytes_FromStringAndSize((char *)digests, DIGEST_BYTES);
    return count == 1 ? made : joined(made, PyBytes_FromStringAndSize((char *)digests + DIGEST_BYTES, DIGEST_BYTES));
}

static PyObject *copy_checked(Py_buffer *into, Py_buffer *source, const uint64_t *seeds, int count)
{
    PyObject *made = NULL;
    if (overlap(into, source))
        PyErr_SetString(PyExc_ValueError, "copy and digest within one memory");
    else if (have_one_size(into, source))
        made = copy_and_digest(into, source, seeds, count);
    PyBuffer_Release(into);
    PyBuffer_Release(source);
    return made;
}

static PyObject *copy_digest(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer into, source;
    unsigned long long seed = 0;
    if (!PyArg_ParseTuple(args, "w*y*|K", &into, &source, &seed))
        return NULL;
    uint64_t seeds[] = {seed};
    return copy_checked(&into, &source, seeds, 1);
}

static PyObject *copy_digests(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer into, source;
    unsigned long long first, second;
    if (!PyArg_ParseTuple(args, "w*y*KK", &into, &source, &first, &second))
        return NULL;
    uint64_t seeds[] = {first, second};
    return copy_checked(&into, &source, seeds, 2);
}

typedef struct {
    Py_buffer into, source;
    unsigned long long seed;
    uint8_t digest[DIGEST_BYTES];
} Copying;

static void release_copying(void *released)
{
    Copying *one = released;
    PyBuffer_Release(&one->into);
    PyBuffer_Release(&one->source);
}

static int parse_copying(PyObject *block, void *parsed)
{
    Copying *one = parsed;
    if (!PyTuple_Check(block)) {
        PyErr_SetString(PyExc_TypeError, "a block to copy is a tuple of two memories and a seed");
        return 0;
    }
    if (!PyArg_ParseTuple(block, "w*y*K", &one->into, &one->source, &one->seed))
        return 0;
    if (overlap(&one->into, &one->source))
        PyErr_SetString(PyExc_ValueError, "copy and digest within one memory");
    else if (have_one_size(&one->into, &one->source))
        return 1;
    release_copying(one);
    return 0;
}

typedef struct {
    Copying *all;
    Py_ssize_t count;
    atomic_long next;
} Copies;

/* Copy those that nobody has taken yet, until none is left. */
static void *copy_some(void *shared)
{
    Copies *copies = shared;
    for (long i; (i = atomic_fetch_add(&copies->next, 1)) < copies->count;) {
        Copying *one = &copies->all[i];
        size_t size = (size_t)one->source.len;
        uint64_t seed = one->seed;
        if (size >= HASHED_FROM_BYTES)
            chosen->copy_digests(one->into.buf, one->source.buf, size, &seed, 1, size >= STREAM_FROM_BYTES,
                                 one->digest);
    }
    return NULL;
}

/* Copy with this thread and others, as many as are worth it and can be had. */
static void copy_with(Copies *copies, long threads)
{
    size_t bytes = 0;
    for (Py_ssize_t i = 0; i < copies->count; i++)
        bytes += (size_t)copies->all[i].source.len;
    if (threads > THREADS_MOST)
        threads = THREADS_MOST;
    if (threads < 1)
        threads = 1;
    if ((size_t)threads > bytes / THREAD_FROM_BYTES)
        threads = (long)(bytes / THREAD_FROM_BYTES);
    pthread_t others[THREADS_MOST];
    long started = 0;
    while (started + 1 < threads && pthread_create(&others[started], NULL, copy_some, copies) == 0)
        started++;
    copy_some(copies);
    while (started > 0)
        pthread_join(others[--started], NULL);
}

static PyObject *copy_all(void *all, Py_ssize_t count, long threads)
{
    Copying *copyings = all;
    Copies copies = {copyings, count, 0};
    Py_BEGIN_ALLOW_THREADS
    copy_with(&copies, threads);
    Py_END_ALLOW_THREADS
    PyObject *made = PyList_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        const Copying *one = &copyings[i];
        uint64_t seed = one->seed;
        PyObject *digest = one->source.len < HASHED_FROM_BYTES
                               ? copy_few(&one->into, &one->source, &seed, 1)
                               : PyBytes_FromStringAndSize((const char *)one->digest, DIGEST_BYTES);
        if (digest == NULL)
            Py_CLEAR(made);
        else
            PyList_SetItem(made, i, digest);
    }
    return made;
}

static PyObject *copy_digest_each(PyObject *Py_UNUSED(module), PyObject *args)
{
    static const Batch batch = {sizeof(Copying), parse_copying, copy_all, release_copying};
    PyObject *asked;
    long threads = 1;
    return PyArg_ParseTuple(args, "O|l", &asked, &threads) ? run_batch(asked, &batch, threads) : NULL;
}

PyMethodDef memory_functions[] = {
    {"copy", copy, METH_VARARGS, NULL},
    {"flush", flush, METH_O, NULL},
    {"xxh3_128", xxh3_128, METH_VARARGS, NULL},
    {"digest_pairs", digest_pairs, METH_O, NULL},
    {"copy_sound", copy_sound, METH_O, NULL},
    {"copy_digest", copy_digest, METH_VARARGS, NULL},
    {"copy_digest_each", copy_digest_each, METH_VARARGS, NULL},
    {"copy_digests", copy_digests, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
