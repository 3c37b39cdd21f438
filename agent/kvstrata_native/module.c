/* The module `_kernels`: buffers in, kernels of the best instruction set that this processor has, no GIL meanwhile. */
#include <string.h>

#include "module.h"

static const Kernels *const all_kernels[] = {
#ifdef __x86_64__
    &kernels_avx512_vbmi2, &kernels_avx512, &kernels_avx2,
#endif
    &kernels_scalar,
};
#define COUNT (sizeof all_kernels / sizeof *all_kernels)

const Kernels *chosen;
PyObject *short_digest;

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

static PyMethodDef functions[] = {
    {"levels", levels, METH_NOARGS, NULL},
    {"use", use, METH_VARARGS, NULL},
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
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && (PyModule_AddFunctions(module, memory_functions) < 0 ||
                           PyModule_AddFunctions(module, codec_functions) < 0))
        Py_CLEAR(module);
    return module;
}
