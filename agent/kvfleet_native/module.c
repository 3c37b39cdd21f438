/* The module `_kernels`: buffers in, kernels of the best instruction set that this processor has, no GIL meanwhile. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#include "kernels.h"

/* From here on a copy goes past the caches: blocks of a tier never fit into them. Measured on an AMD EPYC with 1 MiB of
   L2 and 32 MiB of L3: from 16 KiB to 16 MiB it makes 18-23 GB/s of 9-12 where source and target do not fit, and
   27 of 40 where they do. */
#define STREAM_FROM_BYTES (64u << 10)

/* Below this, waiting to hold the GIL again costs more than the work. */
#define RELEASE_FROM_BYTES (32u << 10)

static const Kernels *const all_kernels[] = {
#ifdef __x86_64__
    &kernels_avx512, &kernels_avx2,
#endif
    &kernels_scalar,
};
#define COUNT (sizeof all_kernels / sizeof *all_kernels)

static const Kernels *chosen;
static PyObject *short_digest; /* xxhash.xxh3_128_digest, for what is shorter than HASHED_FROM_BYTES. */

static const Kernels *named(const char *name)
{
    for (size_t i = 0; i < COUNT; i++)
        if ((name == NULL || strcmp(all_kernels[i]->name, name) == 0) && all_kernels[i]->is_supported())
            return all_kernels[i];
    return NULL;
}

static PyObject *levels(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    PyObject *found = PyList_New(0);
    for (size_t i = 0; found != NULL && i < COUNT; i++) {
        PyObject *name = all_kernels[i]->is_supported() ? PyUnicode_FromString(all_kernels[i]->name) : NULL;
        if (name != NULL && PyList_Append(found, name) < 0)
            Py_CLEAR(found);
        Py_XDECREF(name);
    }
    return found;
}

static PyObject *use(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *name;
    if (!PyArg_ParseTuple(args, "s", &name))
        return NULL;
    const Kernels *wanted = named(name);
    if (wanted == NULL)
        return PyErr_Format(PyExc_ValueError, "kernels of level %s: not for this processor", name);
    chosen = wanted;
    Py_RETURN_NONE;
}

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

typedef struct {
    Py_buffer source;
    unsigned long long seeds[2];
    uint8_t digests[2 * DIGEST_BYTES];
} Pair;

static void hash_pair(Pair *pair)
{
    uint64_t seeds[2] = {pair->seeds[0], pair->seeds[1]};
    if (pair->source.len >= HASHED_FROM_BYTES)
        chosen->digest_pair(pair->source.buf, (size_t)pair->source.len, seeds, pair->digests);
}

static PyObject *told_of(const Pair *pair)
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

static PyObject *hash_pairs(Pair *pairs, Py_ssize_t count)
{
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++)
        hash_pair(&pairs[i]);
    Py_END_ALLOW_THREADS
    PyObject *made = PyList_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        PyObject *told = told_of(&pairs[i]);
        if (told == NULL)
            Py_CLEAR(made);
        else
            PyList_SetItem(made, i, told);
    }
    return made;
}

static PyObject *digest_pairs(PyObject *Py_UNUSED(module), PyObject *asked)
{
    PyObject *blocks = PySequence_List(asked);
    Py_ssize_t count = blocks == NULL ? 0 : PyList_Size(blocks), parsed = 0;
    Pair *pairs = blocks == NULL ? NULL : PyMem_Calloc((size_t)count + 1, sizeof *pairs);
    PyObject *made = NULL;
    if (blocks != NULL && pairs == NULL)
        PyErr_NoMemory();
    while (pairs != NULL && parsed < count) {
        Pair *pair = &pairs[parsed];
        PyObject *block = PyList_GetItem(blocks, parsed);
        if (!PyTuple_Check(block)) {
            PyErr_SetString(PyExc_TypeError, "a block to hash is a tuple of memory and two seeds");
            break;
        }
        if (!PyArg_ParseTuple(block, "y*KK", &pair->source, &pair->seeds[0], &pair->seeds[1]))
            break;
        parsed++;
    }
    if (pairs != NULL && parsed == count)
        made = hash_pairs(pairs, count);
    while (parsed > 0)
        PyBuffer_Release(&pairs[--parsed].source);
    PyMem_Free(pairs);
    Py_XDECREF(blocks);
    return made;
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

/* Whether there are such elements and codes; sets an error if not. */
static int have_form(int element_bytes, int width)
{
    if ((element_bytes == 1 || element_bytes == 2 || element_bytes == 4) && width >= WIDTH_LEAST && width <= WIDTH_MOST)
        return 1;
    PyErr_Format(PyExc_ValueError, "elements of %d B, codes of %d bits: must be 1, 2 or 4 B, and %d to %d bits",
                 element_bytes, width, WIDTH_LEAST, WIDTH_MOST);
    return 0;
}

static PyObject *width_of(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer source;
    int element_bytes;
    if (!PyArg_ParseTuple(args, "y*i", &source, &element_bytes))
        return NULL;
    int width = have_form(element_bytes, WIDTH_LEAST)
                    ? chosen->width_of(source.buf, (size_t)source.len, element_bytes) : 0;
    PyBuffer_Release(&source);
    return width ? PyLong_FromLong(width) : NULL;
}

static int have_room(const Py_buffer *into, const Py_buffer *source, int element_bytes)
{
    size_t need = (size_t)source->len + 2 * ((size_t)source->len / ((size_t)element_bytes * STRIP_BYTES));
    if ((size_t)into->len < need)
        PyErr_Format(PyExc_ValueError, "room for %zd B, %zd B may be needed", into->len, (Py_ssize_t)need);
    return (size_t)into->len >= need;
}

static PyObject *narrow(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer into, source;
    int element_bytes, width;
    size_t filled = 0;
    if (!PyArg_ParseTuple(args, "w*y*ii", &into, &source, &element_bytes, &width))
        return NULL;
    int is_sound = have_form(element_bytes, width) && have_room(&into, &source, element_bytes);
    if (is_sound) {
        Py_BEGIN_ALLOW_THREADS
        filled = chosen->narrow(into.buf, source.buf, (size_t)source.len, element_bytes, width);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&into);
    PyBuffer_Release(&source);
    return is_sound ? PyLong_FromSize_t(filled) : NULL;
}

static PyObject *widen(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer into, stored;
    int element_bytes, width, is_whole = 0;
    if (!PyArg_ParseTuple(args, "w*y*ii", &into, &stored, &element_bytes, &width))
        return NULL;
    int is_sound = have_form(element_bytes, width);
    if (is_sound) {
        Py_BEGIN_ALLOW_THREADS
        is_whole = chosen->widen(into.buf, (size_t)into.len, stored.buf, (size_t)stored.len, element_bytes, width);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&into);
    PyBuffer_Release(&stored);
    return is_sound ? PyBool_FromLong(is_whole) : NULL;
}

/* Whether a grid is sound, and the sizes are those of its elements, codes and scales; sets an error if not. */
static int fits(Grid *grid, const Py_buffer *elements, const Py_buffer *codes, const Py_buffer *scales)
{
    size_t count = (size_t)elements->len / 2, run = grid->is_by_column ? grid->columns : grid->group;
    size_t per_byte = grid->kind == INT4 ? 2 : 1;
    if (grid->kind < FP8 || grid->kind > INT4 || grid->columns == 0 || grid->group == 0 || count % grid->columns != 0 ||
        (!grid->is_by_column && grid->columns % grid->group != 0) || run % per_byte != 0 || elements->len % 2 != 0) {
        PyErr_Format(PyExc_ValueError, "grid of %zd elements, kind %d, %zd columns, groups of %zd",
                     (Py_ssize_t)count, grid->kind, (Py_ssize_t)grid->columns, (Py_ssize_t)grid->group);
        return 0;
    }
    grid->rows = count / grid->columns;
    size_t bands = grid->rows / grid->group + (grid->rows % grid->group != 0);
    size_t groups = grid->is_by_column ? bands * grid->columns : count / grid->group;
    if ((size_t)codes->len != count / per_byte || (size_t)scales->len != groups * 2 * per_byte) {
        PyErr_Format(PyExc_ValueError, "%zd B of codes and %zd B of scales: must be (%zd, %zd)", codes->len, scales->len,
                     (Py_ssize_t)(count / per_byte), (Py_ssize_t)(groups * 2 * per_byte));
        return 0;
    }
    if (((uintptr_t)elements->buf | (uintptr_t)scales->buf) % 2 != 0) {
        PyErr_SetString(PyExc_ValueError, "elements or scales at an odd address");
        return 0;
    }
    return 1;
}

static Grid grid_of(int kind, Py_ssize_t columns, Py_ssize_t group, int is_by_column)
{
    return (Grid){.kind = kind, .is_by_column = is_by_column, .columns = columns > 0 ? (size_t)columns : 0,
                  .group = group > 0 ? (size_t)group : 0};
}

static PyObject *pack(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer codes, scales, source;
    Py_ssize_t columns, group;
    int kind, is_by_column, is_packed = 0;
    if (!PyArg_ParseTuple(args, "w*w*y*(innp)", &codes, &scales, &source, &kind, &columns, &group, &is_by_column))
        return NULL;
    Grid grid = grid_of(kind, columns, group, is_by_column);
    int is_sound = fits(&grid, &source, &codes, &scales);
    if (is_sound) {
        Py_BEGIN_ALLOW_THREADS
        is_packed = chosen->pack(&grid, codes.buf, scales.buf, source.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&codes);
    PyBuffer_Release(&scales);
    PyBuffer_Release(&source);
    return is_sound ? PyBool_FromLong(is_packed) : NULL;
}

static PyObject *unpack(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer into, codes, scales;
    Py_ssize_t columns, group;
    int kind, is_by_column;
    if (!PyArg_ParseTuple(args, "w*y*y*(innp)", &into, &codes, &scales, &kind, &columns, &group, &is_by_column))
        return NULL;
    Grid grid = grid_of(kind, columns, group, is_by_column);
    int is_sound = fits(&grid, &into, &codes, &scales);
    if (is_sound) {
        Py_BEGIN_ALLOW_THREADS
        chosen->unpack(&grid, into.buf, codes.buf, scales.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&into);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&scales);
    return is_sound ? Py_NewRef(Py_None) : NULL;
}

/* Whether a mixing is sound, and a block has its size; sets an error if not. */
static int have_planes(const Mixing *mixing, const Py_buffer *block, const Py_buffer *stored)
{
    size_t plane_bytes = 2 * mixing->rows * mixing->columns;
    if (mixing->planes == 0 || mixing->rows == 0 || mixing->columns == 0 || mixing->columns % 2 != 0 ||
        mixing->rows > PLANE_BYTES_MOST || mixing->columns > PLANE_BYTES_MOST || plane_bytes > PLANE_BYTES_MOST ||
        (size_t)block->len / plane_bytes != mixing->planes || (size_t)block->len % plane_bytes != 0) {
        PyErr_Format(PyExc_ValueError, "%zd planes of %zd rows of %zd columns of %zd B", (Py_ssize_t)mixing->planes,
                     (Py_ssize_t)mixing->rows, (Py_ssize_t)mixing->columns, block->len);
        return 0;
    }
    if (((uintptr_t)block->buf | (uintptr_t)stored->buf) % 2 != 0) {
        PyErr_SetString(PyExc_ValueError, "elements or planes at an odd address");
        return 0;
    }
    return have_form(2, mixing->width);
}

static Mixing mixing_of(Py_ssize_t planes, Py_ssize_t rows, Py_ssize_t columns, int width, double limit, int is_rotated)
{
    return (Mixing){.planes = planes > 0 ? (size_t)planes : 0, .rows = rows > 0 ? (size_t)rows : 0,
                    .columns = columns > 0 ? (size_t)columns : 0, .width = width, .is_rotated = is_rotated != 0,
                    .limit = limit};
}

/* Whether there is room for everything that `mix` fills; sets an error if not. */
static int have_mixing_room(const Mixing *mixing, const Py_buffer *into, const Py_buffer *rungs, const Py_buffer *errors)
{
    size_t plane_bytes = 2 * mixing->rows * mixing->columns;
    size_t need = (HEAD_BYTES + plane_bytes) * mixing->planes + plane_bytes / STRIP_BYTES;
    if ((size_t)into->len >= need && (size_t)rungs->len == mixing->planes &&
        (size_t)errors->len == sizeof(double) * mixing->planes && (uintptr_t)errors->buf % sizeof(double) == 0)
        return 1;
    PyErr_Format(PyExc_ValueError, "room for %zd B, %zd B may be needed; rungs %zd B, errors %zd B", into->len,
                 (Py_ssize_t)need, rungs->len, errors->len);
    return 0;
}

static PyObject *mix(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer into, source, rungs, errors;
    Py_ssize_t planes, rows, columns;
    int width, is_rotated;
    double limit;
    size_t filled = 0;
    if (!PyArg_ParseTuple(args, "w*y*w*w*(nnnidp)", &into, &source, &rungs, &errors, &planes, &rows, &columns, &width,
                          &limit, &is_rotated))
        return NULL;
    Mixing mixing = mixing_of(planes, rows, columns, width, limit, is_rotated);
    int is_sound = have_planes(&mixing, &source, &into) && have_mixing_room(&mixing, &into, &rungs, &errors);
    if (is_sound) {
        Py_BEGIN_ALLOW_THREADS
        filled = chosen->mix(into.buf, source.buf, &mixing, rungs.buf, errors.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&into);
    PyBuffer_Release(&source);
    PyBuffer_Release(&rungs);
    PyBuffer_Release(&errors);
    return is_sound ? PyLong_FromSize_t(filled) : NULL;
}

static PyObject *unmix(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer into, stored;
    Py_ssize_t planes, rows, columns;
    int width, is_rotated, is_whole = 0;
    double limit;
    if (!PyArg_ParseTuple(args, "w*y*(nnnidp)", &into, &stored, &planes, &rows, &columns, &width, &limit, &is_rotated))
        return NULL;
    Mixing mixing = mixing_of(planes, rows, columns, width, limit, is_rotated);
    int is_sound = have_planes(&mixing, &into, &stored);
    if (is_sound) {
        Py_BEGIN_ALLOW_THREADS
        is_whole = chosen->unmix(into.buf, stored.buf, (size_t)stored.len, &mixing);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&into);
    PyBuffer_Release(&stored);
    return is_sound ? PyBool_FromLong(is_whole) : NULL;
}

static PyMethodDef functions[] = {
    {"levels", levels, METH_NOARGS, NULL},
    {"use", use, METH_VARARGS, NULL},
    {"copy", copy, METH_VARARGS, NULL},
    {"xxh3_128", xxh3_128, METH_VARARGS, NULL},
    {"digest_pairs", digest_pairs, METH_O, NULL},
    {"copy_digest", copy_digest, METH_VARARGS, NULL},
    {"copy_digests", copy_digests, METH_VARARGS, NULL},
    {"width_of", width_of, METH_VARARGS, NULL},
    {"narrow", narrow, METH_VARARGS, NULL},
    {"widen", widen, METH_VARARGS, NULL},
    {"mix", mix, METH_VARARGS, NULL},
    {"unmix", unmix, METH_VARARGS, NULL},
    {"pack", pack, METH_VARARGS, NULL},
    {"unpack", unpack, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_kernels", .m_size = -1, .m_methods = functions,
};

PyMODINIT_FUNC PyInit__kernels(void)
{
    PyObject *xxhash = PyImport_ImportModule("xxhash");
    short_digest = xxhash == NULL ? NULL : PyObject_GetAttrString(xxhash, "xxh3_128_digest");
    Py_XDECREF(xxhash);
    if (short_digest == NULL)
        return NULL;
    chosen = named(NULL);
    return PyModule_Create(&definition);
}
