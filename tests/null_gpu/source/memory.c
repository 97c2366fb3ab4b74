// Device memory is host memory that no page backs until somebody writes to it, so a device of 140 GB costs nothing.
//
// Copies move only content that can be looked at later. Kernels write nothing, so a copy from the device gives zeros,
// unless a peer sent the content (mail.c); and copies to and on the device above MAIL_BYTES, which no message carries,
// are counted and left out.

#define _GNU_SOURCE
#include "null_gpu.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MAX_DEVICES = 64, PAGE = 4096, ALIGNMENT = 2 << 20 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range *ranges;
static int num_ranges, capacity;
static size_t charged[MAX_DEVICES];

static size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

static bool add_range(struct range range) {
    pthread_mutex_lock(&lock);
    if (num_ranges == capacity) {
        int more = capacity ? 2 * capacity : 256;
        struct range *grown = realloc(ranges, more * sizeof *ranges);
        if (!grown) {
            pthread_mutex_unlock(&lock);
            return false;
        }
        ranges = grown;
        capacity = more;
    }
    ranges[num_ranges++] = range;
    pthread_mutex_unlock(&lock);
    return true;
}

bool find_range(const void *pointer, struct range *found) {
    const char *at = pointer;
    bool is_found = false;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_ranges && !is_found; i++) {
        is_found = at >= ranges[i].start && at < ranges[i].start + ranges[i].size;
        if (is_found)
            *found = ranges[i];
    }
    pthread_mutex_unlock(&lock);
    return is_found;
}

static enum place place_of(const void *pointer) {
    struct range range;
    return find_range(pointer, &range) ? range.place : PAGEABLE;
}

static bool charge(int device, size_t size) {
    pthread_mutex_lock(&lock);
    bool fits = charged[device] + size <= device_bytes();
    if (fits)
        charged[device] += size;
    pthread_mutex_unlock(&lock);
    return fits;
}

static void discharge(int device, size_t size) {
    pthread_mutex_lock(&lock);
    charged[device] -= size;
    pthread_mutex_unlock(&lock);
}

size_t free_bytes(int device) { return device_bytes() - charged[device]; }

// Memory at a multiple of 2 MiB, as the driver's; its pages are zero, and exist once they are written to.
void *map_memory(size_t size, enum place place, bool is_charged) {
    int device = current_device();
    size = size ? size : 1;
    if (is_charged && !charge(device, size))
        return NULL;
    size_t whole = round_up(size, PAGE);
    char *mapped = mmap(NULL, whole + ALIGNMENT, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped != MAP_FAILED) {
        char *start = (char *)round_up((uintptr_t)mapped, ALIGNMENT);
        size_t before = start - mapped;
        if (before)
            munmap(mapped, before);
        munmap(start + whole, ALIGNMENT - before);
        if (add_range((struct range){start, size, place, device, true, is_charged}))
            return start;
        munmap(start, whole);
    }
    if (is_charged)
        discharge(device, size);
    return NULL;
}

bool free_memory(void *pointer) {
    struct range range = {0};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_ranges; i++)
        if (ranges[i].start == pointer) {
            range = ranges[i];
            ranges[i] = ranges[--num_ranges];
            break;
        }
    pthread_mutex_unlock(&lock);
    if (!range.start)
        return false;
    if (range.charged)
        discharge(range.device, range.size);
    if (range.mapped)
        munmap(range.start, round_up(range.size, PAGE));
    return true;
}

// ---- allocation

EXPORT cudaError_t cudaMalloc(void **pointer, size_t size) {
    count(ALLOCATION, size);
    *pointer = map_memory(size, DEVICE, true);
    return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}

EXPORT cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) {
    return cudaMalloc(pointer, size);
}

EXPORT cudaError_t cudaFree(void *pointer) {
    return !pointer || free_memory(pointer) ? cudaSuccess : cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }

EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    *pointer = map_memory(size, PINNED, false);
    return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}

EXPORT cudaError_t cudaMallocHost(void **pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }
EXPORT cudaError_t cudaFreeHost(void *pointer) { return cudaFree(pointer); }

EXPORT cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    bool added = add_range((struct range){pointer, size, PINNED, current_device(), false, false});
    return added ? cudaSuccess : cudaErrorMemoryAllocation;
}

EXPORT cudaError_t cudaHostUnregister(void *pointer) {
    return free_memory(pointer) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *total = device_bytes();
    *free = free_bytes(current_device());
    return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    struct range range;
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    if (find_range(pointer, &range)) {
        attributes->type = range.place == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
        attributes->device = range.device;
        attributes->devicePointer = (void *)pointer;
        attributes->hostPointer = range.place == DEVICE ? NULL : (void *)pointer;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    *pointer = map_memory(PAGE, DEVICE, false);
    return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = (cudaMemPool_t)16;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    *(uint64_t *)value = 0;
    return cudaSuccess;
}

// ---- copies

static void count_copy(const void *to, const void *from, size_t size) {
    enum place source = place_of(from), target = place_of(to);
    if (source == DEVICE && target != DEVICE) {
        count(COPY_TO_HOST, size);
        if (target == PAGEABLE)
            count(COPY_TO_HOST_PAGEABLE, size);
    } else if (source != DEVICE && target == DEVICE) {
        count(COPY_TO_DEVICE, size);
        if (source == PAGEABLE)
            count(COPY_TO_DEVICE_PAGEABLE, size);
    } else {
        count(COPY_ON_DEVICE, size);
    }
}

static cudaError_t move_to_host(void *to, const void *from, size_t size) {
    if (size > number_from_environment("NULL_GPU_SKIP_COPIES_ABOVE", UINT64_MAX))
        return cudaSuccess;
    switch (settle(from, size)) {
    case ARRIVED:
        memmove(to, from, size);
        return cudaSuccess;
    case NEVER_CAME:
        return cudaErrorLaunchTimeout;
    default:
        memset(to, 0, size);
        return cudaSuccess;
    }
}

static cudaError_t move(void *to, const void *from, size_t size) {
    enum place source = place_of(from), target = place_of(to);
    if (source == DEVICE && target != DEVICE)
        return move_to_host(to, from, size);
    if (size <= MAIL_BYTES || target != DEVICE)
        memmove(to, from, size);
    return cudaSuccess;
}

static cudaError_t copy(void *to, const void *from, size_t size) {
    count_copy(to, from, size);
    return move(to, from, size);
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    count(WAIT_COPY, size);
    return copy(to, from, size);
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                                   cudaStream_t stream) {
    return copy(to, from, size);
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                       size_t size, cudaStream_t stream) {
    return copy(to, from, size);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                     size_t width, size_t height, enum cudaMemcpyKind kind,
                                     cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    count_copy(to, from, width * height);
    for (size_t row = 0; row < height && !error; row++)
        error = move((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return error;
}

EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset,
                                      enum cudaMemcpyKind kind) {
    count(COPY_TO_DEVICE, size);
    return cudaSuccess;
}

// Whole pages become zero by being given back; large fills with anything else are left out, as nothing reads them.
static void fill(char *at, int value, size_t size) {
    if (size <= MAIL_BYTES) {
        memset(at, value, size);
    } else if (value == 0) {
        char *first = (char *)round_up((uintptr_t)at, PAGE),
             *last = (char *)((uintptr_t)(at + size) / PAGE * PAGE);
        memset(at, 0, first - at);
        madvise(first, last - first, MADV_DONTNEED);
        memset(last, 0, at + size - last);
    }
}

EXPORT cudaError_t cudaMemset(void *at, int value, size_t size) {
    fill(at, value, size);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t stream) {
    return cudaMemset(at, value, size);
}
