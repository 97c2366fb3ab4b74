// Small messages between the processes of a run: files in the folder NULL_GPU_MAIL, each removed by its receiver.
//
// A receiver does not wait when it is told to receive, as a host that enqueues ncclRecv does not wait either: the
// message is expected at an address, and a host that copies from there waits for it.

#define _GNU_SOURCE
#include "null_gpu.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { PATH = 4096, SLOTS = 1 << 14, PATIENCE_SECONDS = 300 };

static void write_path(char *path, struct message message) {
    const char *folder = getenv("NULL_GPU_MAIL");
    snprintf(path, PATH, "%s/%016llx.%d.%d.%d", folder ? folder : "/dev/shm",
             (unsigned long long)message.communicator, message.sender, message.receiver, message.number);
}

bool post(struct message message, const void *data, size_t size) {
    char path[PATH], unfinished[PATH + 32];
    write_path(path, message);
    snprintf(unfinished, sizeof unfinished, "%s.unfinished", path);
    int file = open(unfinished, O_CREAT | O_WRONLY | O_TRUNC, 0600);
    bool written = file >= 0 && write(file, data, size) == (ssize_t)size;
    if (file >= 0)
        close(file);
    if (!written || rename(unfinished, path)) {
        fprintf(stderr,
                "null GPU: cannot write %s; NULL_GPU_MAIL must name a folder that all ranks can write to\n",
                path);
        return false;
    }
    return true;
}

static bool take(struct message message, void *data, size_t size) {
    char path[PATH];
    write_path(path, message);
    int file = open(path, O_RDONLY);
    if (file < 0)
        return false;
    bool whole = read(file, data, size) == (ssize_t)size;
    close(file);
    unlink(path);
    return whole;
}

bool await(struct message message, void *data, size_t size) {
    const struct timespec pause = {0, 1000000};
    time_t last = time(NULL) + PATIENCE_SECONDS;
    while (!take(message, data, size)) {
        if (time(NULL) > last) {
            fprintf(
                stderr,
                "null GPU: message %d of rank %d to rank %d never came: sends and receives do not match\n",
                message.number, message.sender, message.receiver);
            return false;
        }
        nanosleep(&pause, NULL);
    }
    return true;
}

// What peers sent, by address. A slot belongs to the last message that was expected there.
static struct slot {
    void *data;
    size_t size;
    bool arrived;
    struct message message;
} slots[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct slot *slot_of(const void *data) { return &slots[((uintptr_t)data >> 8) * 2654435761u % SLOTS]; }

static void set_slot(struct slot new) {
    struct slot *slot = slot_of(new.data);
    if (slot->data && !slot->arrived) {  // nobody looked at the one before: leave no file of it
        char path[PATH];
        write_path(path, slot->message);
        unlink(path);
    }
    *slot = new;
}

void expect(struct message message, void *data, size_t size) {
    pthread_mutex_lock(&lock);
    set_slot((struct slot){data, size, take(message, data, size), message});
    pthread_mutex_unlock(&lock);
}

void keep(const void *data, size_t size) {
    pthread_mutex_lock(&lock);
    set_slot((struct slot){(void *)data, size, true, {0}});
    pthread_mutex_unlock(&lock);
}

enum arrival settle(const void *data, size_t size) {
    pthread_mutex_lock(&lock);
    struct slot slot = *slot_of(data);
    pthread_mutex_unlock(&lock);
    if (slot.data != data || slot.size < size)
        return NOT_EXPECTED;
    if (slot.arrived)
        return ARRIVED;
    if (!await(slot.message, slot.data, slot.size))
        return NEVER_CAME;
    keep(data, slot.size);
    return ARRIVED;
}
