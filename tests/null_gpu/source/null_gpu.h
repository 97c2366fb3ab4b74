// A CUDA device that computes nothing: what its parts share.
//
//   memory.c   device memory is host memory; copies
//   device.c   how many devices there are, and their properties
//   streams.c  streams, events, host waits
//   kernels.c  launches, which do nothing
//   driver.c   the driver's own calls, and how others find them
//   blas.c     cuBLAS, cuBLASLt, cuDNN
//   nccl.c     communicators and collectives
//   mail.c     small messages between ranks, as files
//   counts.c   how often each kind was called, as JSON at the end of the process
//   nothing.c  calls for which doing nothing is right
//   nvrtc.c    a library of its own: the runtime compiler
//
// Every definition is checked against the prototype in the CUDA headers that torch was installed with.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

// ---- counts.c
enum kind {
    LAUNCH,         // a kernel of torch or of a library that torch links
    LAUNCH_TRITON,  // a kernel launched by the driver: Triton's
    COPY_TO_DEVICE,
    COPY_TO_DEVICE_PAGEABLE,  // counted here and above: the host's memory is not pinned
    COPY_TO_HOST,
    COPY_TO_HOST_PAGEABLE,
    COPY_ON_DEVICE,
    WAIT_STREAM,
    WAIT_EVENT,
    WAIT_DEVICE,
    WAIT_COPY,  // cudaMemcpy without Async
    ALLOCATION,
    BLAS,
    ALL_REDUCE,
    REDUCE,
    BROADCAST,
    ALL_GATHER,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    SEND,
    RECV,
    COMMUNICATOR,
    NUM_KINDS
};

struct stub {
    const char *name;
    uint64_t calls;
    struct stub *next;
};

void count(enum kind kind, uint64_t bytes);
long call_unknown(struct stub *stub);  // of a generated stub: counted by name, reported once, succeeds

// ---- memory.c
enum place { PAGEABLE, PINNED, DEVICE };

struct range {
    char *start;
    size_t size;
    enum place place;
    int device;
    bool mapped;   // by us: to be unmapped
    bool charged;  // to the device's memory
};

bool find_range(const void *pointer, struct range *found);
void *map_memory(size_t size, enum place place, bool charged);  // NULL: more than the device has
bool free_memory(void *pointer);
size_t free_bytes(int device);

// ---- device.c
int current_device(void);
size_t device_bytes(void);
int device_attribute(int attribute);
uint64_t number_from_environment(const char *name, uint64_t otherwise);

// ---- streams.c
void *new_handle(void);

// ---- mail.c: a message is known by its communicator, its two ranks, and its number between them
struct message {
    uint64_t communicator;
    int sender, receiver, number;
};

enum { MAIL_BYTES = 1 << 16 };  // larger payloads are not sent: no host reads so much in order to decide

bool post(struct message message, const void *data, size_t size);
// Waits for it; false after five minutes.
bool await(struct message message, void *data, size_t size);
// Does not wait: it arrives when a host copies from `data`, at the latest.
void expect(struct message message, void *data, size_t size);
// What `data` holds can be read: it is a host's.
void keep(const void *data, size_t size);
enum arrival { NOT_EXPECTED, ARRIVED, NEVER_CAME };
// Waits for what is expected at `data`.
enum arrival settle(const void *data, size_t size);
