// Streams and events are handles: work on them is done when it is given, so every query says "done" and no wait blocks.
// Waits are counted, as on a device they would hold up the host.

#include "null_gpu.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>

void *new_handle(void) { return calloc(1, 64); }

static cudaError_t create(void **handle) {
    *handle = new_handle();
    return *handle ? cudaSuccess : cudaErrorMemoryAllocation;
}

// ---- streams

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return create((void **)stream);
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return create((void **)stream);
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) { return create((void **)stream); }

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    free(stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    count(WAIT_STREAM, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize(void) {
    count(WAIT_DEVICE, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    return cudaErrorStreamCaptureUnsupported;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **dependencies,
                                            const cudaGraphEdgeData **edges, size_t *num_dependencies) {
    *status = cudaStreamCaptureStatusNone;
    if (id)
        *id = 0;
    if (num_dependencies)
        *num_dependencies = 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data,
                                         unsigned flags) {
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

// ---- events

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    return create((void **)event);
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return create((void **)event); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    count(WAIT_EVENT, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = 1;
    return cudaSuccess;
}

// ---- errors

EXPORT const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorNoDevice:
        return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    case cudaErrorStreamCaptureUnsupported:
        return "the null GPU captures no graphs";
    case cudaErrorLaunchTimeout:
        return "a message that a peer should have sent never came";
    default:
        return "error of the null GPU";
    }
}

EXPORT const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOfTheNullGpu";
}
