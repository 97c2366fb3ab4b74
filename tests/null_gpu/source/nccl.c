// NCCL without a network. Collectives are counted by kind. Reductions and gathers leave a rank with what it gave, as if
// all ranks had given the same; broadcasts, sends and receives of up to MAIL_BYTES really arrive, as hosts read
// sizes and votes from them. Bytes are those of the buffer that one rank gives (of a reduce-scatter: gets).

#define _GNU_SOURCE
#include "null_gpu.h"

#include <nccl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { GATHERED_BYTES = 1 << 20 };  // larger gathers leave memory alone, which would have to exist

struct ncclComm {
    int num_ranks, rank;
    uint64_t id;
    int num_splits;
    int *sent, *received;  // messages so far, by peer
};

static size_t width(ncclDataType_t type) {
    switch (type) {
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
        return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    default:
        return 1;
    }
}

// FNV-1a
static uint64_t digest(const void *data, size_t size) {
    uint64_t hash = 1469598103934665603ull;
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ ((const unsigned char *)data)[i]) * 1099511628211ull;
    return hash;
}

static struct message next_sent(ncclComm_t comm, int peer) {
    return (struct message){comm->id, comm->rank, peer, comm->sent[peer]++};
}

static struct message next_received(ncclComm_t comm, int peer) {
    return (struct message){comm->id, peer, comm->rank, comm->received[peer]++};
}

// ---- communicators

static ncclResult_t create(ncclComm_t *comm, int num_ranks, int rank, uint64_t id) {
    count(COMMUNICATOR, 0);
    *comm = malloc(sizeof **comm);
    **comm = (struct ncclComm){
        num_ranks, rank, id, 0, calloc(num_ranks, sizeof(int)), calloc(num_ranks, sizeof(int))};
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 0, sizeof *id);
    return getrandom(id->internal, 16, 0) == 16 ? ncclSuccess : ncclSystemError;
}

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *comm, int num_ranks, ncclUniqueId id, int rank) {
    return create(comm, num_ranks, rank, digest(&id, sizeof id));
}

EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int num_ranks, ncclUniqueId id, int rank,
                                           ncclConfig_t *config) {
    return create(comm, num_ranks, rank, digest(&id, sizeof id));
}

EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int num_ranks, int rank, int num_ids,
                                             ncclUniqueId *ids, ncclConfig_t *config) {
    return create(comm, num_ranks, rank, digest(ids, sizeof *ids));
}

// Each rank tells all others its color and key, and finds its place among those of its color.
EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *split,
                                  ncclConfig_t *config) {
    const int mine[2] = {color, key};
    for (int peer = 0; peer < comm->num_ranks; peer++)
        if (peer != comm->rank && !post(next_sent(comm, peer), mine, sizeof mine))
            return ncclSystemError;
    int num_ranks = 0, rank = 0;
    for (int peer = 0; peer < comm->num_ranks; peer++) {
        int theirs[2] = {color, key};
        if (peer != comm->rank && !await(next_received(comm, peer), theirs, sizeof theirs))
            return ncclRemoteError;
        if (theirs[0] == color) {
            num_ranks++;
            rank += theirs[1] < key || (theirs[1] == key && peer < comm->rank);
        }
    }
    const uint64_t source[3] = {comm->id, comm->num_splits++, color};
    *split = NULL;
    return color == NCCL_SPLIT_NOCOLOR ? ncclSuccess
                                       : create(split, num_ranks, rank, digest(source, sizeof source));
}

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    free(comm->sent);
    free(comm->received);
    free(comm);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) { return ncclCommDestroy(comm); }

EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int *number) {
    *number = comm->num_ranks;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

EXPORT const char *ncclGetErrorString(ncclResult_t error) { return "error of the null GPU's NCCL"; }
EXPORT const char *ncclGetLastError(ncclComm_t comm) { return "error of the null GPU's NCCL"; }

EXPORT ncclResult_t ncclMemAlloc(void **pointer, size_t size) {
    *pointer = map_memory(size, DEVICE, true);
    return *pointer ? ncclSuccess : ncclUnhandledCudaError;
}

EXPORT ncclResult_t ncclMemFree(void *pointer) {
    return free_memory(pointer) ? ncclSuccess : ncclInvalidArgument;
}

EXPORT ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buffer, size_t size, void **handle) {
    *handle = new_handle();
    return ncclSuccess;
}

// ---- collectives

EXPORT ncclResult_t ncclAllReduce(const void *given, void *got, size_t number, ncclDataType_t type,
                                  ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
    size_t size = number * width(type);
    count(ALL_REDUCE, size);
    if (given != got && size <= GATHERED_BYTES)
        memmove(got, given, size);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclReduce(const void *given, void *got, size_t number, ncclDataType_t type,
                               ncclRedOp_t operation, int root, ncclComm_t comm, cudaStream_t stream) {
    count(REDUCE, number * width(type));
    return ncclSuccess;
}

EXPORT ncclResult_t ncclAllGather(const void *given, void *got, size_t number, ncclDataType_t type,
                                  ncclComm_t comm, cudaStream_t stream) {
    size_t size = number * width(type);
    count(ALL_GATHER, size);
    for (int rank = 0; rank < comm->num_ranks && size <= GATHERED_BYTES; rank++)
        memmove((char *)got + rank * size, given, size);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclReduceScatter(const void *given, void *got, size_t number, ncclDataType_t type,
                                      ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
    count(REDUCE_SCATTER, number * width(type));
    return ncclSuccess;
}

EXPORT ncclResult_t ncclAlltoAll(const void *given, void *got, size_t number, ncclDataType_t type,
                                 ncclComm_t comm, cudaStream_t stream) {
    count(ALL_TO_ALL, number * width(type) * comm->num_ranks);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclBroadcast(const void *given, void *got, size_t number, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
    size_t size = number * width(type);
    count(BROADCAST, size);
    if (!size || size > MAIL_BYTES)
        return ncclSuccess;
    if (comm->rank != root) {
        expect(next_received(comm, root), got, size);
        return ncclSuccess;
    }
    memmove(got, given, size);
    keep(got, size);
    for (int peer = 0; peer < comm->num_ranks; peer++)
        if (peer != root && !post(next_sent(comm, peer), given, size))
            return ncclSystemError;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclBcast(void *buffer, size_t number, ncclDataType_t type, int root, ncclComm_t comm,
                              cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, number, type, root, comm, stream);
}

EXPORT ncclResult_t ncclSend(const void *given, size_t number, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    size_t size = number * width(type);
    count(SEND, size);
    if (!size || size > MAIL_BYTES)
        return ncclSuccess;
    return post(next_sent(comm, peer), given, size) ? ncclSuccess : ncclSystemError;
}

EXPORT ncclResult_t ncclRecv(void *got, size_t number, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    size_t size = number * width(type);
    count(RECV, size);
    if (size && size <= MAIL_BYTES)
        expect(next_received(comm, peer), got, size);
    return ncclSuccess;
}
