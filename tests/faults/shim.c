/* LD_PRELOAD: watches what a process does to the files below one folder, and makes it die or fail at a chosen moment.
 *
 *   faults_arm(prefix, classes, at, action, error, log, graves)
 *
 * Calls of the chosen classes on paths below `prefix` are counted from 1. With the `at`-th of them `action` happens:
 *   COUNT      nothing
 *   KILL       SIGKILL in its place
 *   TEAR       a write writes half of its bytes, then SIGKILL; any other call is KILL
 *   FAIL_ONCE  it returns `error`, and the calls after it succeed
 *   FAIL_ON    it and all after it return `error`
 *   TEAR_ON    a write writes half of its bytes; the calls after it return `error`
 * `log`, unless empty, gets a line for each counted call that was made: operation, result, size, path, second path.
 * `graves`, unless empty, is a folder on the same file system that gets a hard link to every file before it is unlinked.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, RENAME = 2, FSYNC = 4, UNLINK = 8, MKDIR = 16, WRITE = 32 };
enum { COUNT, KILL, TEAR, FAIL_ONCE, FAIL_ON, TEAR_ON };

static char prefix[PATH_MAX], graves[PATH_MAX];
static int classes, action, error_number, log_fd = -1;
static long at, counted, grave;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void faults_arm(const char *below, int which, long when, int what, int error, const char *log, const char *keep) {
    snprintf(prefix, sizeof prefix, "%s", below);
    snprintf(graves, sizeof graves, "%s", keep);
    classes = which; at = when; action = what; error_number = error; counted = 0; grave = 0;
    log_fd = *log ? (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
}

long faults_counted(void) { return counted; }

static int resolve(int dir, const char *path, char *out) {
    char base[PATH_MAX];
    if (*path == '/') { snprintf(out, PATH_MAX, "%s", path); return 1; }
    if (dir == AT_FDCWD) { if (!getcwd(base, sizeof base)) return 0; }
    else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        ssize_t n = readlink(link, base, sizeof base - 1);
        if (n < 0) return 0;
        base[n] = 0;
    }
    if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
    return 1;
}

static int path_of(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    if (n < 0) return 0;
    out[n] = 0;
    return *out == '/';
}

static int below(const char *path) {
    size_t n = strlen(prefix);
    return n && !strncmp(path, prefix, n) && (path[n] == '/' || path[n] == 0);
}

static void die(void) { syscall(SYS_kill, getpid(), SIGKILL); for (;;) pause(); }

/* 0: go on; -1: fail with errno; 1: tear the write in two. Holds the lock until done() where it counts. */
static int before(int class, const char *path) {
    if (!(classes & class) || !below(path)) return 0;
    pthread_mutex_lock(&lock);
    long now = ++counted;
    int verdict = 0;
    if (at && now == at) {
        if (action == KILL || (action == TEAR && class != WRITE)) die();
        if (action == TEAR || (action == TEAR_ON && class == WRITE)) verdict = 1;
        if (action == FAIL_ONCE || action == FAIL_ON) verdict = -1;
    }
    if (at && now > at && (action == FAIL_ON || action == TEAR_ON)) verdict = -1;
    pthread_mutex_unlock(&lock);
    if (verdict < 0) errno = error_number;
    return verdict;
}

static void note(int class, const char *what, long result, long size, const char *path, const char *other) {
    if (log_fd < 0 || !(classes & class) || !(below(path) || (*other && below(other)))) return;
    int saved = errno;
    char line[3 * PATH_MAX];
    int n = snprintf(line, sizeof line, "%s\t%ld\t%ld\t%s\t%s\n", what, result, size, path, other);
    syscall(SYS_write, log_fd, line, (size_t)n);
    errno = saved;
}

#define REAL(name, type) static type real; if (!real) real = (type)dlsym(RTLD_NEXT, name)

static int opened(int dir, const char *path, int flags, mode_t mode, const char *name) {
    typedef int (*openat_t)(int, const char *, int, ...);
    REAL("openat64", openat_t);
    char full[PATH_MAX];
    (void)name;
    if (!(flags & (O_WRONLY | O_RDWR | O_CREAT)) || !resolve(dir, path, full)) return real(dir, path, flags, mode);
    if (before(OPEN, full) < 0) return -1;
    struct stat known;
    int fresh = lstat(full, &known) != 0;
    int fd = real(dir, path, flags, mode);
    if (fd >= 0) note(OPEN, fresh ? "create" : flags & O_TRUNC ? "truncate" : "open", fd, 0, full, "");
    return fd;
}

#define MODE(last) mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list l; va_start(l, last); mode = va_arg(l, int); va_end(l); }
int open(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode, "open"); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode, "open"); }
int openat(int dir, const char *path, int flags, ...) { MODE(flags) return opened(dir, path, flags, mode, "open"); }
int openat64(int dir, const char *path, int flags, ...) { MODE(flags) return opened(dir, path, flags, mode, "open"); }

static int renamed(int from, const char *old, int to, const char *new, unsigned flags) {
    char a[PATH_MAX], b[PATH_MAX];
    if (!resolve(from, old, a) || !resolve(to, new, b)) return (int)syscall(SYS_renameat2, from, old, to, new, flags);
    if (before(RENAME, a) < 0) return -1;
    struct stat known;
    if (*graves && below(b) && !lstat(b, &known) && S_ISREG(known.st_mode)) {
        char kept[PATH_MAX + 32];
        snprintf(kept, sizeof kept, "%s/%ld", graves, ++grave);
        link(b, kept);
        note(RENAME, "bury", grave, 0, b, "");
    }
    int result = (int)syscall(SYS_renameat2, from, old, to, new, flags);
    if (result == 0) note(RENAME, "rename", result, 0, a, b);
    return result;
}
int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return renamed(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) { return renamed(from, old, to, new, flags); }

static int synced(int fd, int number) {
    char full[PATH_MAX];
    if (path_of(fd, full)) {
        if (before(FSYNC, full) < 0) return -1;
        struct stat now;
        fstat(fd, &now);
        int result = (int)syscall(number, fd);
        if (result == 0) note(FSYNC, S_ISDIR(now.st_mode) ? "syncdir" : "sync", result, now.st_size, full, "");
        return result;
    }
    return (int)syscall(number, fd);
}
int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

static int removed(int dir, const char *path, int flags) {
    char full[PATH_MAX];
    if (!resolve(dir, path, full)) return (int)syscall(SYS_unlinkat, dir, path, flags);
    if (before(UNLINK, full) < 0) return -1;
    if (*graves && below(full) && !(flags & AT_REMOVEDIR)) {
        char kept[PATH_MAX + 32];
        snprintf(kept, sizeof kept, "%s/%ld", graves, ++grave);
        if (!link(full, kept)) note(UNLINK, "bury", grave, 0, full, "");
    }
    int result = (int)syscall(SYS_unlinkat, dir, path, flags);
    if (result == 0) note(UNLINK, flags & AT_REMOVEDIR ? "rmdir" : "unlink", result, 0, full, "");
    return result;
}
int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int unlinkat(int dir, const char *path, int flags) { return removed(dir, path, flags); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) { return removed(AT_FDCWD, path, 0); }

static int made(int dir, const char *path, mode_t mode) {
    char full[PATH_MAX];
    if (resolve(dir, path, full)) {
        if (before(MKDIR, full) < 0) return -1;
        int result = (int)syscall(SYS_mkdirat, dir, path, mode);
        if (result == 0) note(MKDIR, "mkdir", result, 0, full, "");
        return result;
    }
    return (int)syscall(SYS_mkdirat, dir, path, mode);
}
int mkdir(const char *path, mode_t mode) { return made(AT_FDCWD, path, mode); }
int mkdirat(int dir, const char *path, mode_t mode) { return made(dir, path, mode); }

static ssize_t written(int fd, const void *data, size_t size, off_t *where) {
    char full[PATH_MAX];
    int verdict = 0, known = *prefix && path_of(fd, full);
    if (known) verdict = before(WRITE, full);
    if (verdict < 0) return -1;
    if (verdict > 0) size = size > 1 ? size / 2 : size;
    ssize_t done = where ? syscall(SYS_pwrite64, fd, data, size, *where) : syscall(SYS_write, fd, data, size);
    if (verdict > 0 && action == TEAR) die();
    if (known && done > 0) note(WRITE, "write", done, done, full, "");
    return done;
}
ssize_t write(int fd, const void *data, size_t size) { return written(fd, data, size, NULL); }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t where) { return written(fd, data, size, &where); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t where) { return written(fd, data, size, &where); }
ssize_t writev(int fd, const struct iovec *parts, int count) {
    ssize_t total = 0;
    for (int i = 0; i < count; i++) {
        if (!parts[i].iov_len) continue;
        ssize_t done = written(fd, parts[i].iov_base, parts[i].iov_len, NULL);
        if (done < 0) return total ? total : -1;
        total += done;
        if ((size_t)done < parts[i].iov_len) break;
    }
    return total;
}
int ftruncate64(int fd, off_t size) {
    char full[PATH_MAX];
    if (*prefix && path_of(fd, full) && before(WRITE, full) < 0) return -1;
    return (int)syscall(SYS_ftruncate, fd, size);
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }
