/* Codecs of the module `_kernels`: top bytes in fewer bits, packings, and planes in different forms. */
#include "module.h"

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
    /* Memory of no bytes may be anywhere: an empty bytearray of Python 3.13 is at an odd address. */
    if (count > 0 && ((uintptr_t)elements->buf | (uintptr_t)scales->buf) % 2 != 0) {
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

PyMethodDef codec_functions[] = {
    {"width_of", width_of, METH_VARARGS, NULL},
    {"narrow", narrow, METH_VARARGS, NULL},
    {"widen", widen, METH_VARARGS, NULL},
    {"mix", mix, METH_VARARGS, NULL},
    {"unmix", unmix, METH_VARARGS, NULL},
    {"pack", pack, METH_VARARGS, NULL},
    {"unpack", unpack, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
