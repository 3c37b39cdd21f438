/* The module `_kernels`: buffers in, kernels of the best instruction set that this processor has, no GIL meanwhile. */
#include "module.h"

#include "levels.h"

const Kernels *chosen;
PyObject *short_digest;

static PyObject *levels(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    PyObject *found = PyList_New(0);
    for (const Kernels *const *at = all_kernels; found != NULL && *at != NULL; at++) {
        PyObject *name = (*at)->is_supported() ? PyUnicode_FromString((*at)->name) : NULL;
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
    const Kernels *wanted = kernels_named(name);
    if (wanted == NULL)
        return PyErr_Format(PyExc_ValueError, "kernels of level %s: not for this processor", name);
    detach_engine();
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
    chosen = kernels_named(NULL);
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && (PyModule_AddFunctions(module, memory_functions) < 0 ||
                           PyModule_AddFunctions(module, codec_functions) < 0 ||
                           PyModule_AddFunctions(module, offload_functions) < 0))
        Py_CLEAR(module);
    return module;
}
