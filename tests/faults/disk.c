/* A disk that is slow, full or failing: preloaded into a process (LD_PRELOAD), it stands before the C library's calls for
   files below $DISK_ROOT. $DISK_CONTROL, which is read at every call, holds up to seven numbers: milliseconds that a call
   takes; one in how many writes fails with EIO, and one in how many reads (0: none); bytes that fit (-1: all), from the last
   change of that file on; whether what does not fit is written in part; the error for what does not fit (EROFS: nothing is
   opened for writing, made or renamed either); KiB that are written in a second (0: any number). Renames are listed in
   $DISK_CONTROL.renames; $DISK_CONTROL.struck has a byte for every call that failed or was slowed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static atomic_long writes, reads, written;
static _Atomic(long long) changed;

struct disk { long latency_ms, write_eio, read_eio, room, torn, error, kib_per_s; };

static int is_below(const char *path) {
    const char *root = getenv("DISK_ROOT");
    return root && path && strncmp(path, root, strlen(root)) == 0;
}

static int is_file_below(int descriptor) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static void note(const char *suffix, const char *line, size_t length) {
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s.%s", getenv("DISK_CONTROL"), suffix);
    int file = NEXT(open)(name, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (file < 0 || NEXT(write)(file, line, length) != (ssize_t)length) abort();
    close(file);
}

static void slow(long ms) {
    struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    if (ms <= 0) return;
    note("struck", ".", 1);
    nanosleep(&pause, NULL);
}

static struct disk now(void) {
    struct disk disk = {0, 0, 0, -1, 0, ENOSPC, 0};
    char text[128] = "";
    int file = (int)NEXT(open)(getenv("DISK_CONTROL"), O_RDONLY);
    struct stat status;
    if (file >= 0) {
        if (NEXT(read)(file, text, sizeof text - 1) > 0)
            sscanf(text, "%ld %ld %ld %ld %ld %ld %ld", &disk.latency_ms, &disk.write_eio, &disk.read_eio, &disk.room,
                   &disk.torn, &disk.error, &disk.kib_per_s);
        fstat(file, &status);
        long long at = status.st_mtim.tv_sec * 1000000000LL + status.st_mtim.tv_nsec;
        if (atomic_exchange(&changed, at) != at) atomic_store(&written, 0);
        close(file);
    }
    slow(disk.latency_ms);
    return disk;
}

static int fail(int error) {
    note("struck", ".", 1);
    errno = error;
    return -1;
}

static int fails(atomic_long *count, long one_in) {
    return one_in > 0 && atomic_fetch_add(count, 1) % one_in == one_in - 1 && fail(EIO);
}

static int is_read_only(struct disk disk) {
    return disk.room >= 0 && disk.error == EROFS && fail(EROFS);
}

/* How many of the bytes fit; -1, with errno set, if none do. */
static ssize_t room_for(int descriptor, size_t size) {
    if (!is_file_below(descriptor)) return size;
    struct disk disk = now();
    if (fails(&writes, disk.write_eio)) return -1;
    if (disk.kib_per_s) slow((long)size * 1000 / 1024 / disk.kib_per_s);
    long before = atomic_fetch_add(&written, size);
    if (disk.room < 0 || before + (long)size <= disk.room) return size;
    if (disk.torn && before < disk.room) return disk.room - before;
    return fail(disk.error);
}

ssize_t write(int descriptor, const void *bytes, size_t size) {
    ssize_t fits = room_for(descriptor, size);
    return fits < 0 ? -1 : NEXT(write)(descriptor, bytes, fits);
}

ssize_t pwrite(int descriptor, const void *bytes, size_t size, off_t offset) {
    ssize_t fits = room_for(descriptor, size);
    return fits < 0 ? -1 : NEXT(pwrite)(descriptor, bytes, fits, offset);
}

ssize_t pwrite64(int descriptor, const void *bytes, size_t size, off64_t offset) {
    ssize_t fits = room_for(descriptor, size);
    return fits < 0 ? -1 : NEXT(pwrite64)(descriptor, bytes, fits, offset);
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    size_t size = 0;
    for (int i = 0; i < count; i++) size += parts[i].iov_len;
    ssize_t fits = room_for(descriptor, size);
    if (fits < 0) return -1;
    if ((size_t)fits == size) return NEXT(writev)(descriptor, parts, count);
    size_t first = parts[0].iov_len < (size_t)fits ? parts[0].iov_len : (size_t)fits;
    return NEXT(write)(descriptor, parts[0].iov_base, first);
}

ssize_t read(int descriptor, void *bytes, size_t size) {
    if (is_file_below(descriptor) && fails(&reads, now().read_eio)) return -1;
    return NEXT(read)(descriptor, bytes, size);
}

ssize_t pread(int descriptor, void *bytes, size_t size, off_t offset) {
    if (is_file_below(descriptor) && fails(&reads, now().read_eio)) return -1;
    return NEXT(pread)(descriptor, bytes, size, offset);
}

ssize_t pread64(int descriptor, void *bytes, size_t size, off64_t offset) {
    if (is_file_below(descriptor) && fails(&reads, now().read_eio)) return -1;
    return NEXT(pread64)(descriptor, bytes, size, offset);
}

int fsync(int descriptor) {
    if (is_file_below(descriptor) && fails(&writes, now().write_eio)) return -1;
    return NEXT(fsync)(descriptor);
}

int fdatasync(int descriptor) {
    if (is_file_below(descriptor) && fails(&writes, now().write_eio)) return -1;
    return NEXT(fdatasync)(descriptor);
}

static int renamed(const char *from, const char *to) {
    if (!is_below(from) && !is_below(to)) return 0;
    struct disk disk = now();
    if (is_read_only(disk) || fails(&writes, disk.write_eio)) return -1;
    char line[2 * PATH_MAX + 4];
    note("renames", line, snprintf(line, sizeof line, "%s\t%s\n", from, to));
    return 0;
}

int rename(const char *from, const char *to) {
    return renamed(from, to) ? -1 : NEXT(rename)(from, to);
}

int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    return renamed(from, to) ? -1 : NEXT(renameat)(from_directory, from, to_directory, to);
}

int mkdir(const char *path, mode_t mode) {
    return is_below(path) && is_read_only(now()) ? -1 : NEXT(mkdir)(path, mode);
}

#define OPEN(name)                                                                    \
    int name(const char *path, int flags, ...) {                                      \
        va_list more;                                                                 \
        va_start(more, flags);                                                        \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;     \
        va_end(more);                                                                 \
        if (is_below(path)) {                                                         \
            struct disk disk = now();                                                 \
            if (flags & (O_WRONLY | O_RDWR) && is_read_only(disk)) return -1;         \
        }                                                                             \
        return NEXT(name)(path, flags, mode);                                         \
    }
OPEN(open)
OPEN(open64)
