// The driver's contexts and pointers, and the two calls by which others find functions of the driver.

#define _GNU_SOURCE
#include "null_gpu.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>

// ---- entry points

// A function of this library by the driver's name for it; headers call some cuX_v2. NULL where CUDA's headers have none.
static void *entry_point(const char *name) {
    char versioned[256];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    void *function = dlsym(RTLD_DEFAULT, name);
    return function ? function : dlsym(RTLD_DEFAULT, versioned);
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *status) {
    *function = entry_point(name);
    if (status)
        *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags,
                                 CUdriverProcAddressQueryResult *status) {
    *function = entry_point(name);
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// Tables of functions that only NVIDIA's own tools know. Without them CUPTI does not start, and the profiler goes on without
// the device's kernels.
EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    *table = NULL;
    return CUDA_ERROR_NOT_SUPPORTED;
}

// ---- contexts: one a device, always active

static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(4096 + device); }

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    if (flags)
        *flags = 0;
    if (active)
        *active = 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = context_of(device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = context_of(current_device());
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    *device = current_device();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "error of the null GPU";
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

// ---- pointers

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    struct range range;
    if (!find_range((void *)pointer, &range))
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = range.place == DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = range.device;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        *(CUdeviceptr *)value = pointer;
        break;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)value = context_of(range.device);
        break;
    default:
        *(uint64_t *)value = 0;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *size, CUdeviceptr pointer) {
    struct range range;
    if (!find_range((void *)pointer, &range))
        return CUDA_ERROR_INVALID_VALUE;
    if (start)
        *start = (CUdeviceptr)range.start;
    if (size)
        *size = range.size;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetInfo(size_t *free, size_t *total) {
    *total = device_bytes();
    *free = free_bytes(current_device());
    return CUDA_SUCCESS;
}
