// How often each kind of call was made, and with how many bytes: a flat JSON object that the process writes at its end
// into the folder NULL_GPU_COUNTS, if the variable is set and the process used a device.

#define _GNU_SOURCE
#include "null_gpu.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char *const NAMES[NUM_KINDS] = {
    [LAUNCH] = "launch",
    [LAUNCH_TRITON] = "launch.triton",
    [COPY_TO_DEVICE] = "copy.host_to_device",
    [COPY_TO_DEVICE_PAGEABLE] = "copy.host_to_device.pageable",
    [COPY_TO_HOST] = "copy.device_to_host",
    [COPY_TO_HOST_PAGEABLE] = "copy.device_to_host.pageable",
    [COPY_ON_DEVICE] = "copy.device_to_device",
    [WAIT_STREAM] = "wait.stream",
    [WAIT_EVENT] = "wait.event",
    [WAIT_DEVICE] = "wait.device",
    [WAIT_COPY] = "wait.copy",
    [ALLOCATION] = "allocation",
    [BLAS] = "blas",
    [ALL_REDUCE] = "nccl.all_reduce",
    [REDUCE] = "nccl.reduce",
    [BROADCAST] = "nccl.broadcast",
    [ALL_GATHER] = "nccl.all_gather",
    [REDUCE_SCATTER] = "nccl.reduce_scatter",
    [ALL_TO_ALL] = "nccl.all_to_all",
    [SEND] = "nccl.send",
    [RECV] = "nccl.recv",
    [COMMUNICATOR] = "nccl.communicator",
};

static uint64_t calls[NUM_KINDS], bytes_of[NUM_KINDS];
static struct stub *unknown;
static pid_t owner;  // whose counts these are
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void count(enum kind kind, uint64_t bytes) {
    __atomic_add_fetch(&calls[kind], 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&bytes_of[kind], bytes, __ATOMIC_RELAXED);
}

long call_unknown(struct stub *stub) {
    pthread_mutex_lock(&lock);
    if (stub->calls++ == 0) {
        stub->next = unknown;
        unknown = stub;
        fprintf(stderr, "null GPU: %s is not known; it does nothing and returns 0\n", stub->name);
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

struct text {
    char *at;
    size_t size, used;
};

static void append(struct text *text, const char *format, ...) {
    va_list values;
    va_start(values, format);
    char *end = text->used < text->size ? text->at + text->used : NULL;
    int length = vsnprintf(end, end ? text->size - text->used : 0, format, values);
    va_end(values);
    text->used += length > 0 ? length : 0;
}

static void append_number(struct text *text, const char *name, const char *suffix, uint64_t value) {
    if (value)
        append(text, "%s\n  \"%s%s\": %llu", text->used > 1 ? "," : "", name, suffix,
               (unsigned long long)value);
}

// The counts as JSON: writes at most `size` bytes and a zero, returns the length of the whole text.
EXPORT size_t null_gpu_counts(char *at, size_t size) {
    struct text text = {at, size, 0};
    append(&text, "{");
    for (int kind = 0; kind < NUM_KINDS; kind++) {
        append_number(&text, NAMES[kind], "", calls[kind]);
        append_number(&text, NAMES[kind], ".bytes", bytes_of[kind]);
    }
    pthread_mutex_lock(&lock);
    for (struct stub *stub = unknown; stub; stub = stub->next)
        append_number(&text, "unknown.", stub->name, stub->calls);
    pthread_mutex_unlock(&lock);
    append(&text, "\n}\n");
    return text.used;
}

static bool used_a_device(void) {
    bool used = unknown != NULL;
    for (int kind = 0; kind < NUM_KINDS; kind++)
        used |= calls[kind] > 0;
    return used;
}

static void write_counts(void) {
    static bool written;
    const char *folder = getenv("NULL_GPU_COUNTS");
    if (!folder || !*folder || written || getpid() != owner || !used_a_device())
        return;
    written = true;
    const char *rank = getenv("RANK");
    char path[4096], part[4096 + 8]; // the process may be killed meanwhile
    snprintf(path, sizeof path, "%s/rank-%s.%d.json", folder, rank && *rank ? rank : "0", getpid());
    snprintf(part, sizeof part, "%s.part", path);
    size_t size = null_gpu_counts(NULL, 0) + 4096;  // other threads may go on counting
    char *text = malloc(size);
    FILE *file = fopen(part, "w");
    if (!text || !file) {
        fprintf(stderr, "null GPU: cannot write %s\n", path);
        return;
    }
    null_gpu_counts(text, size);
    fputs(text, file);
    if (fclose(file) || rename(part, path))
        fprintf(stderr, "null GPU: cannot write %s\n", path);
}

// A child of a fork starts at zero: its parent writes what came before. A child of a vfork owns nothing, and writes nothing.
static void forget(void) {
    owner = getpid();
    memset(calls, 0, sizeof calls);
    memset(bytes_of, 0, sizeof bytes_of);
    for (; unknown; unknown = unknown->next)
        unknown->calls = 0;
}

__attribute__((constructor)) static void start(void) {
    owner = getpid();
    pthread_atfork(NULL, NULL, forget);
}
__attribute__((destructor)) static void end(void) { write_counts(); }

// os._exit() runs no destructors.
EXPORT void _exit(int status) {
    write_counts();
    syscall(SYS_exit_group, status);
    __builtin_unreachable();
}
