/* Every kernel, once; a file for each instruction set includes it after defining
   LEVEL (the name of its table), LEVEL_NAME, TARGET (a function attribute), is_supported() and stream_line(). */
#include <string.h>

#include "kernels.h"

#define LINE 64 /* Bytes of a cache line, on every processor that we know of. */

TARGET static void stream(uint8_t *into, const uint8_t *source, size_t size)
{
    size_t head = (size_t)(-(uintptr_t)into & (LINE - 1));
    if (head > size)
        head = size;
    memcpy(into, source, head);
    size_t i = head;
    for (; i + LINE <= size; i += LINE)
        stream_line(into + i, source + i);
    memcpy(into + i, source + i, size - i);
}

TARGET static void copy(uint8_t *into, const uint8_t *source, size_t size)
{
    stream(into, source, size);
    stream_end();
}

const Kernels LEVEL = {
    .name = LEVEL_NAME,
    .is_supported = is_supported,
    .copy = copy,
};
