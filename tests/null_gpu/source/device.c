// How many devices there are, and how they describe themselves: as an H200, unless the environment says otherwise.
//
//   NULL_GPU_DEVICES     how many (1)
//   NULL_GPU_NAME        name of each ("NVIDIA H200")
//   NULL_GPU_MEMORY      bytes of each (139.8 GiB)

#include "null_gpu.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    THREADS = 1024,
    SHARED_PER_BLOCK = 48 << 10,
    SHARED_PER_BLOCK_OPTIN = 227 << 10,
    SHARED_PER_PROCESSOR = 228 << 10,
    REGISTERS = 1 << 16,
    PROCESSORS = 132,
    L2_BYTES = 50 << 20,
};

static __thread int current;

uint64_t number_from_environment(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static int num_devices(void) { return (int)number_from_environment("NULL_GPU_DEVICES", 1); }
int current_device(void) { return current; }
size_t device_bytes(void) { return number_from_environment("NULL_GPU_MEMORY", 150109100441ull); }

static const char *device_name(void) {
    const char *name = getenv("NULL_GPU_NAME");
    return name && *name ? name : "NVIDIA H200";
}

// Attributes have the same numbers in the runtime and in the driver.
int device_attribute(int attribute) {
    switch ((enum cudaDeviceAttr)attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
        return THREADS;
    case cudaDevAttrMaxBlockDimZ:
        return 64;
    case cudaDevAttrMaxGridDimX:
        return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
        return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        return SHARED_PER_BLOCK;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        return SHARED_PER_BLOCK_OPTIN;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        return SHARED_PER_PROCESSOR;
    case cudaDevAttrReservedSharedMemoryPerBlock:
        return 1024;
    case cudaDevAttrWarpSize:
        return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
        return REGISTERS;
    case cudaDevAttrClockRate:
        return 1980000;  // kHz
    case cudaDevAttrMemoryClockRate:
        return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth:
        return 6144;  // bits
    case cudaDevAttrMultiProcessorCount:
        return PROCESSORS;
    case cudaDevAttrL2CacheSize:
        return L2_BYTES;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
        return 32;
    case cudaDevAttrComputeCapabilityMajor:
        return 9;
    case cudaDevAttrComputeCapabilityMinor:
        return 0;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrClusterLaunch:
        return 1;
    default:
        break;
    }
    switch ((CUdevice_attribute)attribute) {  // those of the driver alone
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        return 1;
    default:
        return 0;  // multicast among them: there is no symmetric memory
    }
}

EXPORT cudaError_t cudaGetDeviceCount(int *number) {
    *number = num_devices();
    return *number ? cudaSuccess : cudaErrorNoDevice;
}

EXPORT cudaError_t cudaGetDevice(int *device) {
    *device = current;
    return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= num_devices())
        return cudaErrorInvalidDevice;
    current = device;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = device_attribute(attribute);
    return cudaSuccess;
}

static void write_uuid(char *bytes, int device) {
    for (int i = 0; i < 16; i++)
        bytes[i] = (char)(17 * i + device);
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    if (device < 0 || device >= num_devices())
        return cudaErrorInvalidDevice;
    *properties = (struct cudaDeviceProp){
        .totalGlobalMem = device_bytes(),
        .sharedMemPerBlock = SHARED_PER_BLOCK,
        .sharedMemPerBlockOptin = SHARED_PER_BLOCK_OPTIN,
        .sharedMemPerMultiprocessor = SHARED_PER_PROCESSOR,
        .regsPerBlock = REGISTERS,
        .regsPerMultiprocessor = REGISTERS,
        .warpSize = 32,
        .maxThreadsPerBlock = THREADS,
        .maxThreadsDim = {THREADS, THREADS, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .maxThreadsPerMultiProcessor = 2048,
        .maxBlocksPerMultiProcessor = 32,
        .totalConstMem = 1 << 16,
        .textureAlignment = 512,
        .major = 9,
        .minor = 0,
        .multiProcessorCount = PROCESSORS,
        .l2CacheSize = L2_BYTES,
        .memoryBusWidth = 6144,
        .asyncEngineCount = 3,
        .unifiedAddressing = 1,
        .concurrentKernels = 1,
        .cooperativeLaunch = 1,
        .pciBusID = device + 1,
    };
    snprintf(properties->name, sizeof properties->name, "%s", device_name());
    write_uuid(properties->uuid.bytes, device);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

// ---- the same for the driver

EXPORT CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *number) {
    *number = num_devices();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < num_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDeviceGetName(char *text, int size, CUdevice device) {
    snprintf(text, size, "%s", device_name());
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    write_uuid(uuid->bytes, device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem(size_t *size, CUdevice device) {
    *size = device_bytes();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = device_attribute(attribute);
    return CUDA_SUCCESS;
}
