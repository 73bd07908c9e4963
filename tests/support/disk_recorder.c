/* Preloaded into a process, records every write to the files of one directory, in order: what a disk gets to see.
 *
 * DISK_RECORDER_DIRECTORY: the directory. DISK_RECORDER_FILE: the recording. Each record: kind (1 byte), length of the
 * path (4), offset (8), length of the data (8), all in the machine's order; then path and data. power_cuts.py reads it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static int recording = -1;

static void record(char kind, const char *path, uint64_t offset, uint64_t length, const void *data) {
    const char *directory = getenv("DISK_RECORDER_DIRECTORY"), *file = getenv("DISK_RECORDER_FILE");
    if (!directory || !file || strncmp(path, directory, strlen(directory)) != 0) return;
    uint32_t path_length = (uint32_t)strlen(path);
    char head[21] = {kind};
    memcpy(head + 1, &path_length, 4);
    memcpy(head + 5, &offset, 8);
    memcpy(head + 13, &length, 8);
    struct iovec parts[3] = {{head, sizeof head}, {(void *)path, path_length}, {(void *)data, data ? length : 0}};
    if (recording < 0) recording = open(file, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (recording < 0 || writev(recording, parts, 3) < 0) abort(); /* a recording with a gap proves nothing */
}

static void record_of(int descriptor, char kind, uint64_t offset, uint64_t length, const void *data) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length_of_path = readlink(link, path, sizeof path - 1);
    if (length_of_path < 0) return;
    path[length_of_path] = 0;
    record(kind, path, offset, length, data);
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define ENTER pthread_mutex_lock(&one_at_a_time)
#define LEAVE pthread_mutex_unlock(&one_at_a_time)

ssize_t pwrite64(int descriptor, const void *data, size_t length, off64_t offset) {
    REAL(pwrite64);
    ENTER;
    ssize_t done = real(descriptor, data, length, offset);
    if (done > 0) record_of(descriptor, 'w', (uint64_t)offset, (uint64_t)done, data);
    LEAVE;
    return done;
}

ssize_t pwrite(int descriptor, const void *data, size_t length, off_t offset) {
    return pwrite64(descriptor, data, length, offset);
}

int ftruncate64(int descriptor, off64_t length) {
    REAL(ftruncate64);
    ENTER;
    int status = real(descriptor, length);
    if (status == 0) record_of(descriptor, 't', (uint64_t)length, 0, NULL);
    LEAVE;
    return status;
}

int ftruncate(int descriptor, off_t length) { return ftruncate64(descriptor, length); }

int truncate64(const char *path, off64_t length) {
    REAL(truncate64);
    ENTER;
    int status = real(path, length);
    if (status == 0) record('t', path, (uint64_t)length, 0, NULL);
    LEAVE;
    return status;
}

int truncate(const char *path, off_t length) { return truncate64(path, length); }

int fsync(int descriptor) {
    REAL(fsync);
    ENTER;
    int status = real(descriptor);
    if (status == 0) record_of(descriptor, 's', 0, 0, NULL);
    LEAVE;
    return status;
}

int fdatasync(int descriptor) {
    REAL(fdatasync);
    ENTER;
    int status = real(descriptor);
    if (status == 0) record_of(descriptor, 's', 0, 0, NULL);
    LEAVE;
    return status;
}

int unlink(const char *path) {
    REAL(unlink);
    ENTER;
    int status = real(path);
    if (status == 0) record('u', path, 0, 0, NULL);
    LEAVE;
    return status;
}
