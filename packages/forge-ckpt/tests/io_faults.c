/* LD_PRELOAD: makes one call of the file system fail, as FORGE_FAULT="call path errno" says, and makes the file
   FORGE_FAULT_MARK, where that is set, when it does.
   A path that ends with $ must end so; it is that of the descriptor where a call has one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static int fails(const char *call, const char *path) {
    const char *fault = getenv("FORGE_FAULT");
    char wanted[32], part[256];
    int number;
    if (!fault || sscanf(fault, "%31s %255s %d", wanted, part, &number) != 3) return 0;
    size_t end = strlen(part), length = strlen(path);
    if (strcmp(call, wanted)) return 0;
    if (part[end - 1] == '$') {
        part[--end] = 0;
        if (length < end || strcmp(path + length - end, part)) return 0;
    } else if (!strstr(path, part)) {
        return 0;
    }
    const char *mark = getenv("FORGE_FAULT_MARK");
    int file = mark ? creat(mark, 0644) : -1;
    if (file >= 0) close(file);
    errno = number;
    return 1;
}

static int fails_fd(const char *call, int fd) {
    char link[64], path[4096];
    int saved = errno;
    if (!getenv("FORGE_FAULT")) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (size < 0) return 0;
    path[size] = 0;
    return fails(call, path);
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

int fsync(int fd) { return fails_fd("fsync", fd) ? -1 : REAL(int, "fsync", int)(fd); }

int close(int fd) { /* as on Linux: it is closed, whatever close says */
    int bad = fails_fd("close", fd), number = errno;
    int result = REAL(int, "close", int)(fd);
    if (!bad) return result;
    errno = number;
    return -1;
}

int rename(const char *from, const char *to) {
    if (fails("rename", from)) return -1;
    return REAL(int, "rename", const char *, const char *)(from, to);
}

int mkdir(const char *path, mode_t mode) {
    return fails("mkdir", path) ? -1 : REAL(int, "mkdir", const char *, mode_t)(path, mode);
}

int unlinkat(int fd, const char *path, int flags) {
    if (fails_fd("unlinkat", fd)) return -1;
    return REAL(int, "unlinkat", int, const char *, int)(fd, path, flags);
}

#define WRITE(name)                                                            \
    ssize_t name(int fd, const void *data, size_t size, off_t at) {            \
        if (fails_fd("pwrite", fd)) return -1;                                 \
        return REAL(ssize_t, #name, int, const void *, size_t, off_t)(fd, data, size, at); \
    }
WRITE(pwrite)
WRITE(pwrite64)

#define READ(name)                                                             \
    ssize_t name(int fd, const struct iovec *to, int count, off_t at) {        \
        if (fails_fd("preadv", fd)) return -1;                                 \
        return REAL(ssize_t, #name, int, const struct iovec *, int, off_t)(fd, to, count, at); \
    }
READ(preadv)
READ(preadv64)

#define READ2(name)                                                            \
    ssize_t name(int fd, const struct iovec *to, int count, off_t at, int flags) { \
        if (fails_fd("preadv", fd)) return -1;                                 \
        return REAL(ssize_t, #name, int, const struct iovec *, int, off_t, int)(fd, to, count, at, flags); \
    }
READ2(preadv2)
READ2(preadv64v2)
