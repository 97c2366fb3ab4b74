// The runtime compiler, a library of its own as torch loads it by its name: every program compiles to a few zeros.

#include "null_gpu.h"

#include <nvrtc.h>
#include <stdlib.h>
#include <string.h>

enum { CODE_BYTES = 8 };

EXPORT nvrtcResult nvrtcVersion(int *major, int *minor) {
    *major = CUDA_MAJOR;
    *minor = 0;
    return NVRTC_SUCCESS;
}

EXPORT const char *nvrtcGetErrorString(nvrtcResult error) { return "error of the null GPU's compiler"; }

EXPORT nvrtcResult nvrtcCreateProgram(nvrtcProgram *program, const char *source, const char *name,
                                      int num_headers, const char *const *headers,
                                      const char *const *include_names) {
    *program = calloc(1, 64);
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcDestroyProgram(nvrtcProgram *program) {
    free(*program);
    *program = NULL;
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int num_options, const char *const *options) {
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcAddNameExpression(nvrtcProgram program, const char *name) { return NVRTC_SUCCESS; }

EXPORT nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char *name, const char **lowered) {
    *lowered = "kernel";
    return NVRTC_SUCCESS;
}

static nvrtcResult write_size(size_t *size) {
    *size = CODE_BYTES;
    return NVRTC_SUCCESS;
}

static nvrtcResult write_code(char *code) {
    memset(code, 0, CODE_BYTES);
    return NVRTC_SUCCESS;
}

EXPORT nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t *size) { return write_size(size); }
EXPORT nvrtcResult nvrtcGetPTX(nvrtcProgram program, char *code) { return write_code(code); }
EXPORT nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t *size) { return write_size(size); }
EXPORT nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char *code) { return write_code(code); }
EXPORT nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t *size) { return write_size(size); }
EXPORT nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char *text) { return write_code(text); }
