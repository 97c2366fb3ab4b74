// Kernels are launched and do nothing. Their modules, limits and occupancies are those of a plausible kernel, so that
// code that chooses a launch by them finds one.

#include "null_gpu.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <string.h>

enum { THREADS = 1024, REGISTERS = 32, SHARED_BYTES = 227 << 10, BLOCKS = 2, CLUSTERS = 32 };

// ---- of torch and its libraries, by the runtime

EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                    size_t shared, cudaStream_t stream) {
    count(LAUNCH, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
                                       void **arguments) {
    count(LAUNCH, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                               size_t shared, cudaStream_t stream) {
    count(LAUNCH, 0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = THREADS;
    attributes->numRegs = REGISTERS;
    attributes->binaryVersion = 90;
    attributes->ptxVersion = 90;
    attributes->maxDynamicSharedSizeBytes = SHARED_BYTES;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function,
                                                                 int threads, size_t shared) {
    *blocks = BLOCKS;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                                          int threads, size_t shared,
                                                                          unsigned flags) {
    *blocks = BLOCKS;
    return cudaSuccess;
}

EXPORT cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *options,
                                       void **values, unsigned num_options,
                                       enum cudaLibraryOption *library_options, void **library_values,
                                       unsigned num_library_options) {
    *library = new_handle();
    return cudaSuccess;
}

EXPORT cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    *kernel = new_handle();
    return cudaSuccess;
}

// What compiled CUDA code calls for kernel<<<grid, block>>>(...); these stand in no header for C.

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                                      size_t shared, cudaStream_t stream) {
    count(LAUNCH, 0);
    return cudaSuccess;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

EXPORT char __cudaInitModule(void **handle) { return 1; }

// ---- of Triton, by the driver

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                               CUstream stream, void **arguments, void **extra) {
    count(LAUNCH_TRITON, 0);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments,
                                 void **extra) {
    count(LAUNCH_TRITON, 0);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                                          unsigned grid_z, unsigned block_x, unsigned block_y,
                                          unsigned block_z, unsigned shared, CUstream stream,
                                          void **arguments) {
    count(LAUNCH_TRITON, 0);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = new_handle();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned num_options,
                                   CUjit_option *options, void **values) {
    return cuModuleLoadData(module, image);
}

EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path) { return cuModuleLoadData(module, path); }

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = new_handle();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetGlobal(CUdeviceptr *pointer, size_t *size, CUmodule module, const char *name) {
    *pointer = (CUdeviceptr)map_memory(4096, DEVICE, false);
    if (size)
        *size = 4096;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = THREADS;
        break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
        *value = REGISTERS;
        break;
    default:
        *value = 0;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads,
                                                            size_t shared) {
    *blocks = BLOCKS;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function,
                                             const CUlaunchConfig *config) {
    *clusters = CLUSTERS;
    return CUDA_SUCCESS;
}
