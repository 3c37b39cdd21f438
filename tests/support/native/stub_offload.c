/* A library of the offload interface that does no work: what a host has to stand. By one of the macros below. */
#define _DEFAULT_SOURCE /* nanosleep. */
#include "offload.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef OTHER_MAJOR
#define VERSION (7u << 16 | 3)
#else
#define VERSION KVO_ABI_VERSION
#endif

struct KvoDevice {
    int is_open;
};
struct KvoQueue {
    KvoDescriptor asked;
    int is_busy;
};

static int32_t open_device(uint32_t version, const char *configuration, KvoDevice **device)
{
    (void)version, (void)configuration;
#ifdef NO_DEVICE
    return KVO_E_DEVICE;
#else
    *device = calloc(1, sizeof **device);
    return KVO_OK;
#endif
}

static int32_t close_device(KvoDevice *device)
{
    free(device);
    return KVO_OK;
}

static int32_t describe(KvoDevice *device, KvoDescription *is)
{
    (void)device;
#ifdef LATIN_NAME
    strcpy(is->name, "st\374b");
#else
    strcpy(is->name, "stub");
#endif
    strcpy(is->version, "0.5");
    is->capabilities = KVO_CAP_COPY | KVO_CAP_DIGEST | KVO_CAP_NARROW | KVO_CAP_PACK | KVO_CAP_MIX;
#ifndef REGISTERED_ONLY
    is->capabilities |= KVO_CAP_SHARED_MEMORY;
#endif
    is->queues_max = 2, is->depth_max = 4, is->batch_max = 4, is->segments_max = 4;
    is->digest_bytes_min = 241, is->bytes_max = 1u << 30;
#ifdef NO_LIMITS
    is->alignment_bytes = 3;
#else
    is->alignment_bytes = 1;
#endif
    return KVO_OK;
}

static int32_t count_device(KvoDevice *device, KvoCounters *counters)
{
    (void)device, (void)counters;
    return KVO_OK;
}

static int32_t register_memory(KvoDevice *device, uint64_t address, uint64_t size_bytes, uint64_t *memory)
{
    (void)device, (void)address, (void)size_bytes, (void)memory;
    return KVO_E_LIMIT;
}

static int32_t unregister_memory(KvoDevice *device, uint64_t memory)
{
    (void)device, (void)memory;
    return KVO_E_MEMORY;
}

static int32_t queue_create(KvoDevice *device, uint32_t depth, KvoQueue **queue)
{
    (void)device, (void)depth;
    *queue = calloc(1, sizeof **queue);
    return KVO_OK;
}

static int32_t queue_destroy(KvoQueue *queue)
{
    free(queue);
    return KVO_OK;
}

static int32_t submit(KvoQueue *queue, const KvoDescriptor *batch, uint32_t count, uint32_t *accepted)
{
    queue->asked = batch[0];
    queue->is_busy = 1;
    *accepted = count;
    return KVO_OK;
}

static int32_t poll_queue(KvoQueue *queue, KvoCompletion *done, uint32_t most, uint64_t timeout_ns, uint32_t *count)
{
    (void)most, (void)timeout_ns;
#ifdef SLOW
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
#endif
    done->tag = queue->asked.tag;
#if defined(LIES) /* Says that it has done all, and has done nothing. */
    done->status = KVO_OK;
#elif defined(OVERFILLS)
    done->status = KVO_OK;
    done->filled_bytes = ~0ull;
#elif defined(OTHER_TAG)
    done->status = KVO_OK;
    done->tag ^= 1;
#else
    done->status = KVO_E_DEVICE;
#endif
    *count = 1;
    return KVO_OK;
}

static int32_t cancel(KvoQueue *queue, uint64_t tag)
{
    (void)queue, (void)tag;
    return KVO_E_NOT_FOUND;
}

const KvoApi *kvstrata_offload_api(uint32_t host)
{
    static const KvoApi api = {
        VERSION, sizeof api, open_device, close_device, describe, count_device, register_memory, unregister_memory,
        queue_create, queue_destroy, submit, poll_queue, cancel,
    };
    (void)host;
    return &api;
}
