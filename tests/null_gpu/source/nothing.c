// Calls for which doing nothing is right: they set what nothing reads, free what was never made, or wait for what is done.
// No header is included, as one definition serves all signatures: arguments are ignored, and 0 is success everywhere.

#include "null_gpu.h"

#define NOTHING(name) \
    EXPORT long name(void) { return 0; }

// What compiled CUDA code does when it is loaded and before it launches
NOTHING(__cudaRegisterFatBinary)
NOTHING(__cudaRegisterFatBinaryEnd)
NOTHING(__cudaRegisterFunction)
NOTHING(__cudaRegisterVar)
NOTHING(__cudaUnregisterFatBinary)
NOTHING(__cudaPushCallConfiguration)
NOTHING(__cudaPopCallConfiguration)
NOTHING(cudaFuncSetAttribute)
NOTHING(cudaKernelSetAttributeForDevice)
NOTHING(cudaLibraryUnload)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuModuleUnload)
NOTHING(cuTensorMapEncodeTiled)

// All that was enqueued is done, and nothing fails later
NOTHING(cudaGetLastError)
NOTHING(cudaPeekAtLastError)
NOTHING(cudaStreamQuery)
NOTHING(cudaStreamWaitEvent)
NOTHING(cudaThreadExchangeStreamCaptureMode)
NOTHING(cudaEventQuery)
NOTHING(cudaEventRecord)
NOTHING(cudaEventRecordWithFlags)

// Settings
NOTHING(cuLogsRegisterCallback)
NOTHING(cuLogsUnregisterCallback)
NOTHING(cuInit)
NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxPushCurrent_v2)
NOTHING(cuCtxPopCurrent_v2)
NOTHING(cudaDeviceEnablePeerAccess)
NOTHING(cudaMemPoolSetAccess)
NOTHING(cudaMemPoolSetAttribute)
NOTHING(cudaMemPoolTrimTo)
NOTHING(cudaProfilerStart)
NOTHING(cudaProfilerStop)
NOTHING(cublasSetMathMode)
NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasSetSmCountTarget)
NOTHING(cublasSetStream_v2)
NOTHING(cublasSetWorkspace_v2)
NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatrixLayoutSetAttribute)
NOTHING(cudnnSetStream)
NOTHING(ncclGroupStart)
NOTHING(ncclGroupEnd)
NOTHING(ncclCommFinalize)
NOTHING(ncclCommDeregister)
NOTHING(ncclRedOpCreatePreMulSum)
NOTHING(ncclRedOpDestroy)
