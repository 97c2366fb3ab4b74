// cuBLAS, cuBLASLt and cuDNN: handles, versions and one algorithm for every product. The products themselves are
// generated stubs (stubs.py) that count. cuDNN has no plans; the shim keeps torch from asking for them.

#include "null_gpu.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cudnn.h>
#include <stdlib.h>
#include <string.h>

static cublasStatus_t create(void **handle) {
    *handle = new_handle();
    return *handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

static cublasStatus_t destroy(void *handle) {
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasCreate(cublasHandle_t *handle) { return create((void **)handle); }
EXPORT cublasStatus_t cublasDestroy(cublasHandle_t handle) { return destroy(handle); }

EXPORT cublasStatus_t cublasGetVersion(cublasHandle_t handle, int *version) {
    *version = CUBLAS_VERSION;
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
    *mode = CUBLAS_DEFAULT_MATH;
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasGetPointerMode(cublasHandle_t handle, cublasPointerMode_t *mode) {
    *mode = CUBLAS_POINTER_MODE_HOST;
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
EXPORT cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { return create((void **)handle); }

EXPORT cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *description, cublasComputeType_t compute,
                                               cudaDataType_t scale) {
    return create((void **)description);
}

EXPORT cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
    return destroy(description);
}

EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                                 uint64_t rows, uint64_t columns, int64_t leading) {
    return create((void **)layout);
}

EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return destroy(layout); }

EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    return create((void **)preference);
}

EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    return destroy(preference);
}

EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle,
                                                     cublasLtMatmulDesc_t description,
                                                     cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                     cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                     cublasLtMatmulPreference_t preference, int num_wanted,
                                                     cublasLtMatmulHeuristicResult_t results[],
                                                     int *num_results) {
    memset(results, 0, sizeof *results);  // its state is CUBLAS_STATUS_SUCCESS, its workspace empty
    *num_results = 1;
    return CUBLAS_STATUS_SUCCESS;
}

// ---- cuDNN

EXPORT size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
EXPORT size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
EXPORT const char *cudnnGetErrorString(cudnnStatus_t error) { return "error of the null GPU"; }

EXPORT cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
    *handle = new_handle();
    return CUDNN_STATUS_SUCCESS;
}
