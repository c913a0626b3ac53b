/* Writes files in every way that programs do, and says what came of it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { printf("line %d: %s: %s\n", __LINE__, #what, strerror(errno)); exit(1); } } while (0)

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static __thread uint64_t seed = 1;
static uint64_t draw(uint64_t below) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed % below;
}

static int create(const char *path) {
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
    CHECK(fd >= 0);
    return fd;
}

/* Pieces of so many bytes, each with its number; the time of one in ns. */
static void pieces(const char *path, long count, int size) {
    int fd = create(path);
    char piece[65536];
    double begin = now();
    for (long n = 0; n < count; n++) {
        memset(piece, 0, sizeof piece < 8 ? sizeof piece : 8);
        memcpy(piece, &n, 8);
        CHECK(write(fd, piece, size) == size);
    }
    double wrote = now();
    CHECK(close(fd) == 0);
    printf("%.1f ns, with close %.1f\n", (wrote - begin) / count * 1e9, (now() - begin) / count * 1e9);
}

/* Numbers that grow forever, or as many as were asked for, so many bytes of them at once; what was written so far is told by memory. */
static void forever(const char *path, const char *count_path, long records, long len) {
    int fd = strstr(path, ".append") ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0644) : create(path), told = open(count_path, O_RDWR | O_CREAT, 0644);
    CHECK(ftruncate(told, 4096) == 0);
    volatile uint64_t *done = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, told, 0);
    CHECK(done != MAP_FAILED);
    uint64_t *numbers = malloc(len);
    for (uint64_t n = 0; records == 0 || n < (uint64_t)records; *done = n) {
        for (long at = 0; at < len / 8; at++) numbers[at] = n++;
        CHECK(write(fd, numbers, len) == len);
    }
    CHECK(close(fd) == 0);
}

static char *oracle;
static off_t size;
#define MOST (1 << 20)

static void keep(off_t at, const char *bytes, size_t len) {
    memcpy(oracle + at, bytes, len);
    if (at + (off_t)len > size) size = at + len;
}

static void compare(int fd) {
    static char read_back[MOST];
    struct stat st;
    CHECK(fstat(fd, &st) == 0);
    if (st.st_size != size) printf("size %ld instead of %ld\n", (long)st.st_size, (long)size);
    CHECK(st.st_size == size);
    CHECK(pread(fd, read_back, MOST, 0) == size);
    for (off_t at = 0; at < size; at++)
        if (read_back[at] != oracle[at]) {
            printf("byte %ld is %d instead of %d\n", (long)at, read_back[at], oracle[at]);
            exit(1);
        }
}

/* Whatever may be done with a file, at random, beside an array that says what it holds. */
static void random_steps(const char *path, long steps) {
    char other[4096], bytes[70000];
    snprintf(other, sizeof other, "%s.2", path);
    oracle = calloc(1, MOST + 200000);
    int fds[4] = { create(path), -1, -1, -1 };
    off_t at[4] = { 0 };
    int same[4] = { 0, -1, -1, -1 };
    for (long step = 0; step < steps; step++) {
        int which = draw(4);
        if (fds[which] < 0) which = 0;
        int fd = fds[which];
        off_t *offset = &at[same[which]];
        size_t len = draw(20) ? 1 + draw(300) : draw(70000);
        for (size_t n = 0; n < len; n += 1 + len / 64) bytes[n] = draw(256);
        switch (draw(32)) {
        case 0 ... 13:
            if (*offset + (off_t)len > MOST) { *offset = 0; CHECK(lseek(fd, 0, SEEK_SET) == 0); }
            CHECK(write(fd, bytes, len) == (ssize_t)len);
            keep(*offset, bytes, len);
            *offset += len;
            break;
        case 14: case 15: {
            off_t to = draw(MOST - len + 1);
            CHECK(pwrite(fd, bytes, len, to) == (ssize_t)len);
            keep(to, bytes, len);
            break;
        }
        case 16: {
            if (*offset + (off_t)len > MOST) break;
            size_t half = len / 2;
            struct iovec parts[] = { { bytes, half }, { bytes + half, len - half } };
            CHECK(writev(fd, parts, 2) == (ssize_t)len);
            keep(*offset, bytes, len);
            *offset += len;
            break;
        }
        case 17: case 18:
            *offset = draw(size + 1);
            CHECK(lseek(fd, *offset, SEEK_SET) == *offset);
            break;
        case 19: {
            off_t by = (off_t)draw(200) - 100;
            if (*offset + by < 0) by = 0;
            *offset += by;
            CHECK(lseek(fd, by, SEEK_CUR) == *offset);
            if (*offset > MOST - 1000) { *offset = 0; CHECK(lseek(fd, 0, SEEK_SET) == 0); }
            break;
        }
        case 20:
            *offset = size;
            CHECK(lseek(fd, 0, SEEK_END) == size);
            break;
        case 21: {
            size_t want = draw(1000);
            ssize_t got = read(fd, bytes, want);
            off_t there = size > *offset ? size - *offset : 0;
            CHECK(got == (ssize_t)(want < (size_t)there ? want : (size_t)there));
            CHECK(memcmp(bytes, oracle + *offset, got) == 0);
            *offset += got;
            break;
        }
        case 22: {
            off_t to = draw(size + 1000);
            if (to > MOST) break;
            CHECK((draw(2) ? truncate(path, to) : ftruncate(fd, to)) == 0);
            if (to < size) memset(oracle + to, 0, size - to);
            size = to;
            break;
        }
        case 23: compare(fd); break;
        case 24: CHECK(fsync(fd) == 0); break;
        case 25: case 26: {
            /* Another descriptor: of the same open file, or of another one. */
            int slot = 1 + draw(3);
            if (fds[slot] >= 0) CHECK(close(fds[slot]) == 0);
            for (int n = 0; n < 4; n++)
                if (same[n] == slot && n != slot) goto used;
            if (draw(2)) {
                CHECK((fds[slot] = open(path, O_RDWR)) >= 0);
                same[slot] = slot;
                at[slot] = 0;
            } else {
                CHECK((fds[slot] = draw(2) ? dup(fds[0]) : fcntl(fds[0], F_DUPFD_CLOEXEC, 20)) >= 0);
                same[slot] = 0;
            }
            break;
        used:
            fds[slot] = -1;
            break;
        }
        case 27: {
            /* A child that writes at the offset that both have. */
            if (draw(8) || *offset + (off_t)len > MOST) break;
            pid_t pid = fork();
            CHECK(pid >= 0);
            if (pid == 0) _exit(write(fd, bytes, len) == (ssize_t)len ? 0 : 1);
            int status;
            CHECK(waitpid(pid, &status, 0) == pid && status == 0);
            keep(*offset, bytes, len);
            *offset += len;
            break;
        }
        case 28: {
            if (draw(8)) break;
            char line[9000];
            snprintf(line, sizeof line, "test $(stat -c %%s %s) = %ld", path, (long)size);
            CHECK(system(line) == 0);
            break;
        }
        case 29: {
            CHECK(rename(path, other) == 0 && rename(other, path) == 0);
            struct stat st;
            CHECK(stat(path, &st) == 0 && st.st_size == size);
            break;
        }
        case 30: {
            /* Open again, so that it is kept again. */
            for (int n = 0; n < 4; n++)
                if (fds[n] >= 0) {
                    CHECK(close(fds[n]) == 0);
                    fds[n] = same[n] = -1;
                }
            CHECK((fds[0] = open(path, O_RDWR)) >= 0);
            same[0] = 0;
            at[0] = 0;
            break;
        }
        case 31: {
            /* A system call that is not libc's. */
            if (*offset + (off_t)len > MOST) break;
            long got;
            __asm__ volatile("syscall" : "=a"(got) : "a"(SYS_write), "D"((long)fd), "S"(bytes), "d"(len) : "rcx", "r11", "memory");
            CHECK(got == (long)len);
            keep(*offset, bytes, len);
            *offset += len;
            break;
        }
        }
    }
    compare(fds[0]);
}


/* What several processes and threads know together of one file. */
struct together {
    pthread_mutex_t alone;
    off_t size, at;
    long done;
    char bytes[MOST];
};
static struct together *all;

static void same_there(int fd) {
    oracle = all->bytes;
    size = all->size;
    compare(fd);
}

static void put(off_t at, const char *bytes, size_t len) {
    memcpy(all->bytes + at, bytes, len);
    if (at + (off_t)len > all->size) all->size = at + len;
}

/* Threads of each. */
static int crew = 1;

/* One of several processes on one file: what it inherited, what it opens itself, and what it appends. Others do the same between its steps, and
   nobody makes a system call to say so. */
static void one_of_many(const char *path, long steps, int memory, int inherited, char *self) {
    char bytes[70000], other[4096], words[5][32];
    CHECK((all = mmap(0, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0)) != MAP_FAILED);
    snprintf(other, sizeof other, "%s.%d", path, getpid());
    int fds[4] = { inherited, open(path, O_RDWR), open(path, O_RDWR | O_APPEND), dup(inherited) };
    off_t own = 0, appended = -1;
    CHECK(fds[1] >= 0 && fds[2] >= 0 && fds[3] >= 0);
    for (; steps > 0; steps--) {
        size_t len = draw(24) ? 1 + draw(200) : draw(70000);
        for (size_t n = 0; n < len; n += 1 + len / 64) bytes[n] = draw(256);
        int which = draw(4);
        int fd = fds[which];
        off_t *at = which == 1 ? &own : &all->at;
        pthread_mutex_lock(&all->alone);
        all->done++;
        switch (draw(24)) {
        case 0 ... 8:
            if (which == 2) {
                if (all->size + (off_t)len > MOST) break;
                off_t to = all->size;
                if (draw(3)) {
                    CHECK(write(fd, bytes, len) == (ssize_t)len);
                    appended = to + len;
                } else {
                    /* Linux appends, whatever the offset. */
                    CHECK(pwrite(fd, bytes, len, 5) == (ssize_t)len);
                }
                put(to, bytes, len);
                break;
            }
            if (*at + (off_t)len > MOST) { *at = draw(1000); CHECK(lseek(fd, *at, SEEK_SET) == *at); }
            CHECK(write(fd, bytes, len) == (ssize_t)len);
            put(*at, bytes, len);
            *at += len;
            break;
        case 9: case 10: {
            if (which == 2) break;
            off_t to = draw(MOST - len + 1);
            CHECK(pwrite(fd, bytes, len, to) == (ssize_t)len);
            put(to, bytes, len);
            break;
        }
        case 11: {
            if (which == 2 || *at + (off_t)len > MOST) break;
            size_t half = len / 2;
            struct iovec parts[] = { { bytes, half }, { bytes + half, len - half } };
            CHECK(writev(fd, parts, 2) == (ssize_t)len);
            put(*at, bytes, len);
            *at += len;
            break;
        }
        case 12: case 13: {
            off_t from = draw(all->size + 1);
            ssize_t there = all->size - from < (off_t)len ? all->size - from : (off_t)len;
            CHECK(pread(fd, bytes, len, from) == there && memcmp(bytes, all->bytes + from, there) == 0);
            break;
        }
        case 14: {
            if (which == 2) {
                if (appended >= 0) CHECK(lseek(fd, 0, SEEK_CUR) == appended);
                break;
            }
            ssize_t there = *at >= all->size ? 0 : all->size - *at < (off_t)len ? all->size - *at : (off_t)len;
            CHECK(read(fd, bytes, len) == there && memcmp(bytes, all->bytes + *at, there) == 0);
            *at += there;
            break;
        }
        case 15:
            if (which == 2) break;
            *at = draw(all->size + 1);
            CHECK(lseek(fd, *at, SEEK_SET) == *at);
            break;
        case 16:
            CHECK(lseek(fd, 0, SEEK_END) == all->size);
            *(which == 2 ? &appended : at) = all->size;
            break;
        case 17: {
            struct stat st;
            CHECK((draw(2) ? stat(path, &st) : fstat(fd, &st)) == 0);
            if (st.st_size != all->size) printf("size %ld instead of %ld\n", (long)st.st_size, (long)all->size);
            CHECK(st.st_size == all->size);
            break;
        }
        case 18: {
            off_t to = draw(all->size + 1000);
            if (to > MOST || draw(4)) break;
            CHECK((draw(2) ? truncate(path, to) : ftruncate(fd, to)) == 0);
            if (to < all->size) memset(all->bytes + to, 0, all->size - to);
            all->size = to;
            break;
        }
        case 19:
            if (draw(10) == 0) same_there(fd);
            break;
        case 20:
            if (draw(10) == 0) CHECK(fsync(fd) == 0);
            break;
        case 21:
            if (draw(4)) break;
            CHECK(link(path, other) == 0 && unlink(other) == 0);
            CHECK(close(fds[1]) == 0 && (fds[1] = open(path, O_RDWR)) >= 0);
            own = 0;
            CHECK(close(fds[2]) == 0 && (fds[2] = open(path, O_RDWR | O_APPEND)) >= 0);
            appended = -1;
            CHECK(close(fds[3]) == 0 && (fds[3] = dup(inherited)) >= 0);
            break;
        case 22: {
            if (draw(20)) break;
            /* A child, which goes on alone and leaves what it wrote. */
            pid_t pid = fork();
            CHECK(pid >= 0);
            if (pid == 0) {
                for (int n = 0; n < 5 && all->at + 10 <= MOST; n++) {
                    CHECK(write(inherited, bytes, 10) == 10);
                    put(all->at, bytes, 10);
                    all->at += 10;
                }
                _exit(0);
            }
            int status;
            CHECK(waitpid(pid, &status, 0) == pid && status == 0);
            break;
        }
        case 23: {
            if (draw(100) || crew > 1) break;
            /* The same program again, with what it inherits. */
            long numbers[5] = { draw(1 << 30), steps, memory, inherited, 0 };
            for (int n = 0; n < 4; n++) snprintf(words[n], sizeof words[n], "%ld", numbers[n]);
            pthread_mutex_unlock(&all->alone);
            for (int n = 1; n < 4; n++) close(fds[n]);
            execl(self, self, "one", path, words[0], words[1], words[2], words[3], (char *)0);
            CHECK(!"executed");
        }
        }
        pthread_mutex_unlock(&all->alone);
    }
}

struct one {
    const char *path;
    long steps;
    int memory, inherited;
    char *self;
    uint64_t seed;
};

static void *one_thread(void *argument) {
    struct one *one = argument;
    seed = one->seed;
    one_of_many(one->path, one->steps, one->memory, one->inherited, one->self);
    return 0;
}

static void many(const char *path, long steps, int processes, char *self) {
    int memory = memfd_create("together", 0), fd = create(path);
    CHECK(ftruncate(memory, sizeof *all) == 0);
    CHECK((all = mmap(0, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0)) != MAP_FAILED);
    pthread_mutexattr_t shared;
    pthread_mutexattr_init(&shared);
    pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&all->alone, &shared);
    for (int n = 0; n < processes; n++) {
        draw(2);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            seed = seed * 31 + n * 2 + 1;
            pthread_t threads[16];
            struct one ones[16];
            for (int m = 0; m < crew; m++) {
                ones[m] = (struct one){ path, steps / processes / crew, memory, fd, self, seed * 37 + m * 2 };
                if (m > 0) CHECK(pthread_create(&threads[m], 0, one_thread, &ones[m]) == 0);
            }
            one_thread(&ones[0]);
            for (int m = 1; m < crew; m++) CHECK(pthread_join(threads[m], 0) == 0);
            exit(0);
        }
    }
    for (int n = 0; n < processes; n++) {
        int status;
        CHECK(wait(&status) > 0 && status == 0);
    }
    same_there(fd);
    CHECK(close(fd) == 0);
    CHECK((fd = open(path, O_RDONLY)) >= 0);
    same_there(fd);
    printf("%ld steps\n", all->done);
}

/* A large write after the other, and what the program waits for them. */
static void large(const char *path, long count, int mebibytes) {
    size_t len = (size_t)mebibytes << 20;
    char *bytes = malloc(len);
    memset(bytes, 7, len);
    int fd = create(path);
    CHECK(write(fd, bytes, len) == (ssize_t)len);
    for (long n = 0; n < count; n++) {
        double begin = now();
        CHECK(write(fd, bytes, len) == (ssize_t)len);
        double took = now() - begin;
        CHECK(fsync(fd) == 0);
        printf("%ld: %.3f ms, until it is there %.3f ms\n", n, took * 1e3, (now() - begin) * 1e3);
    }
    CHECK(close(fd) == 0);
}

/* Large writes in every way, beside an array that says what the file holds. */
static void bulk(const char *path, long steps) {
    const size_t most = 48 << 20;
    char *bytes = malloc(most), *seen = malloc(most);
    oracle = calloc(1, 2 * most);
    size = 0;
    FILE *file = fopen(path, "w+");
    CHECK(file != 0);
    int fd = fileno(file), appending = open(path, O_WRONLY | O_APPEND);
    CHECK(appending >= 0);
    for (long step = 0; step < steps; step++) {
        size_t len = 1 + draw(draw(3) ? 6 << 20 : 70000), half = len / 3;
        for (size_t n = 0; n < len; n += 1 + len / 4096) bytes[n] = draw(256);
        off_t at = draw(2) ? size : (off_t)draw(size + 100000);
        struct iovec parts[] = { { bytes, half }, { bytes + half, len - half } };
        if (at + len > most) at = draw(most / 2);
        switch (draw(8)) {
        case 0: case 1:
            CHECK(lseek(fd, at, SEEK_SET) == at && write(fd, bytes, len) == (ssize_t)len);
            CHECK(lseek(fd, 0, SEEK_CUR) == at + (off_t)len);
            break;
        case 2:
            CHECK(pwrite(fd, bytes, len, at) == (ssize_t)len);
            break;
        case 3:
            CHECK(lseek(fd, at, SEEK_SET) == at && writev(fd, parts, 2) == (ssize_t)len);
            break;
        case 4:
            CHECK(fseek(file, at, SEEK_SET) == 0 && fwrite(bytes, 1, len, file) == len && fflush(file) == 0);
            break;
        case 5:
            at = size;
            if (size + len > most) continue;
            CHECK((draw(2) ? write(appending, bytes, len) : writev(appending, parts, 2)) == (ssize_t)len);
            break;
        case 6: {
            /* A child writes where both are. */
            if (draw(3)) continue;
            CHECK(lseek(fd, at, SEEK_SET) == at);
            pid_t pid = fork();
            CHECK(pid >= 0);
            if (pid == 0) _exit(write(fd, bytes, len) == (ssize_t)len ? 0 : 1);
            int status;
            CHECK(waitpid(pid, &status, 0) == pid && status == 0 && lseek(fd, 0, SEEK_CUR) == at + (off_t)len);
            break;
        }
        case 7: {
            ssize_t there = at >= size ? 0 : size - at < (off_t)len ? size - at : (off_t)len;
            CHECK(pread(fd, seen, len, at) == there && memcmp(seen, oracle + at, there) == 0);
            continue;
        }
        }
        keep(at, bytes, len);
    }
    CHECK(fclose(file) == 0 && close(appending) == 0 && (fd = open(path, O_RDONLY)) >= 0);
    CHECK(pread(fd, seen, most, 0) == size && memcmp(seen, oracle, size) == 0 && close(fd) == 0);
}

/* Words of a process's record. */
static long record_len(long process, long nth) {
    return 1 + (process * 7919 + nth * 104729) % 700000;
}

/* Processes that append large records of their own, and one that does so at once: none is torn, none lost, and each one's are in order. */
static void records(const char *path, int processes, long count) {
    close(create(path));
    for (long process = 0; process < processes; process++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid > 0) continue;
        int fd = open(path, O_WRONLY | O_APPEND | (process == 0 ? O_SYNC : 0));
        uint64_t *record = malloc(700000 * 8);
        for (long nth = 0; nth < count; nth++) {
            long len = record_len(process, nth);
            for (long at = 0; at < len; at++) record[at] = (uint64_t)process << 56 | (uint64_t)nth << 32 | at;
            CHECK(write(fd, record, len * 8) == len * 8);
            usleep(nth % 4 * 10000);
        }
        CHECK(close(fd) == 0);
        _exit(0);
    }
    for (int n = 0; n < processes; n++) {
        int status;
        CHECK(wait(&status) > 0 && status == 0);
    }
    long next[16] = { 0 };
    FILE *file = fopen(path, "r");
    static uint64_t record[700000];
    while (fread(record, 8, 1, file) == 1) {
        long process = record[0] >> 56, nth = record[0] >> 32 & 0xffffff, len = record_len(process, nth);
        CHECK(process < processes && nth == next[process]++ && fread(record + 1, 8, len - 1, file) == (size_t)len - 1);
        for (long at = 0; at < len; at++) CHECK(record[at] == ((uint64_t)process << 56 | (uint64_t)nth << 32 | at));
    }
    for (int n = 0; n < processes; n++) CHECK(next[n] == count);
}

/* Processes of which each writes every so many-th record of a file, the first one before the others begin. */
static void turns(const char *path, int processes, long count) {
    uint64_t record[8];
    close(create(path));
    for (int process = 0; process < processes; process++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid > 0) continue;
        if (process > 0) usleep(20000);
        int fd = open(path, O_WRONLY);
        for (long nth = process; nth < count; nth += processes) {
            for (int at = 0; at < 8; at++) record[at] = nth * 8 + at;
            CHECK(pwrite(fd, record, sizeof record, nth * sizeof record) == sizeof record);
        }
        CHECK(close(fd) == 0);
        _exit(0);
    }
    for (int n = 0; n < processes; n++) {
        int status;
        CHECK(wait(&status) > 0 && status == 0);
    }
    FILE *file = fopen(path, "r");
    for (long nth = 0; nth < count; nth++) {
        CHECK(fread(record, sizeof record, 1, file) == 1);
        for (int at = 0; at < 8; at++) CHECK(record[at] == (uint64_t)(nth * 8 + at));
    }
    CHECK(fgetc(file) == EOF);
}

static int signalled;
static volatile long handled;
static void handler(int signal) {
    (void)signal;
    CHECK(write(signalled, "h", 1) == 1);
    handled++;
}

/* A handler that writes to the file that is being written. */
static void signals(const char *path, long count) {
    signalled = create(path);
    struct sigaction action = { .sa_handler = handler, .sa_flags = SA_RESTART };
    CHECK(sigaction(SIGALRM, &action, 0) == 0);
    struct itimerval every = { { 0, 50 }, { 0, 50 } };
    CHECK(setitimer(ITIMER_REAL, &every, 0) == 0);
    for (long n = 0; n < count; n++) CHECK(write(signalled, "abc", 3) == 3);
    CHECK(setitimer(ITIMER_REAL, &(struct itimerval){ 0 }, 0) == 0);
    CHECK(lseek(signalled, 0, SEEK_CUR) == 3 * count + handled);
    CHECK(close(signalled) == 0);
    FILE *file = fopen(path, "r");
    long others = 0;
    for (int byte, next = 0; (byte = getc(file)) != EOF;)
        if (byte == 'h') {
            others++;
        } else {
            CHECK(byte == "abc"[next]);
            next = (next + 1) % 3;
        }
    CHECK(others == handled);
    printf("handled %s\n", handled > 10 ? "many" : "few");
}

static const char *thread_path;
static int thread_fd;
static void *thread(void *argument) {
    long which = (long)argument;
    char record[16];
    for (int n = 0; n < 20000; n++) {
        snprintf(record, sizeof record, "%03ld%011d\n", which, n);
        CHECK(write(thread_fd, record, 15) == 15);
    }
    return 0;
}

/* Threads that share an open file: no record is lost, none torn, and each thread's are in order. */
static void threads(const char *path) {
    thread_path = path;
    thread_fd = create(path);
    pthread_t all[4];
    for (long n = 0; n < 4; n++) CHECK(pthread_create(&all[n], 0, thread, (void *)n) == 0);
    for (int n = 0; n < 4; n++) pthread_join(all[n], 0);
    CHECK(close(thread_fd) == 0);
    FILE *file = fopen(path, "r");
    char line[64];
    int next[4] = { 0 }, which, number;
    while (fgets(line, sizeof line, file)) {
        CHECK(strlen(line) == 15 && sscanf(line, "%3d%11d", &which, &number) == 2);
        CHECK(which >= 0 && which < 4 && next[which] == number);
        next[which]++;
    }
    for (int n = 0; n < 4; n++) CHECK(next[n] == 20000);
}

/* Two processes on one file: what the one wrote the other sees, without any system call in between that could tell. */
static void two(const char *path) {
    volatile long *turn = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    unlink(path);
    pid_t pid = fork();
    CHECK(pid >= 0);
    int fd = open(path, O_RDWR | O_CREAT, 0644);
    CHECK(fd >= 0);
    for (long n = 0; n < 400; n++) {
        while (*turn != 2 * n + (pid == 0)) __builtin_ia32_pause();
        char bytes[12];
        for (int piece = 0; piece < 4; piece++) {
            memset(bytes, n + piece + (pid == 0), sizeof bytes);
            CHECK(pwrite(fd, bytes, 12, piece * 12) == 12);
        }
        if (n % 3 == 0) {
            char seen[48];
            CHECK(pread(fd, seen, 48, 0) == 48);
            for (int at = 0; at < 48; at++) CHECK(seen[at] == (char)(n + at / 12 + (pid == 0)));
        }
        *turn = 2 * n + 1 + (pid == 0);
    }
    if (pid == 0) _exit(0);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

/* More open files than are watched: what was written is seen through all of them, and by two descriptors of one. */
static void crowd(const char *path) {
    char seen[16] = { 0 };
    int fd = create(path), all[600];
    CHECK(write(fd, "old", 3) == 3);
    for (int n = 0; n < 600; n++) CHECK((all[n] = open(path, O_RDONLY)) >= 0 && close(dup(all[n])) == 0);
    for (int n = 0, got; n < 20000; n++)
        CHECK(pwrite(fd, &n, 4, 0) == 4 && pread(all[599], &got, 4, 0) == 4 && got == n);
    int one = open(path, O_WRONLY | O_TRUNC), other = dup(one);
    CHECK(one >= 0 && other >= 0);
    for (int n = 0; n < 600; n++) close(all[n]);
    for (int n = 0; n < 4; n++) CHECK(write(n % 2 ? one : other, "ab" + n % 2, 1) == 1);
    CHECK(pread(fd, seen, 16, 0) == 4 && !memcmp(seen, "abab", 4));
}

/* What is not kept: appended, synchronous, locked, mapped, limited. */
static void special(const char *path) {
    char bytes[64] = "0123456789", *much = calloc(2, 1 << 20);
    struct iovec one = { much, 2 << 20 };
    int large = create(path);
    CHECK(writev(large, &one, 1) == 2 << 20 && lseek(large, 0, SEEK_END) == 2 << 20 && close(large) == 0);
    free(much);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_APPEND, 0644), other = open(path, O_RDWR | O_APPEND);
    CHECK(fd >= 0 && other >= 0);
    for (int n = 0; n < 100; n++) CHECK(write(n % 2 ? fd : other, &n, 4) == 4);
    CHECK(lseek(fd, 0, SEEK_CUR) == 400 && lseek(fd, 0, SEEK_END) == 400);
    for (int n = 0, got; n < 100; n++) CHECK(pread(fd, &got, 4, n * 4) == 4 && got == n);
    close(fd);
    close(other);
    fd = create(path);
    for (int n = 0; n < 10; n++) CHECK(write(fd, bytes, 10) == 10);
    char *mapped = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(mapped != MAP_FAILED && memcmp(mapped + 90, bytes, 10) == 0);
    CHECK(write(fd, bytes, 10) == 10 && memcmp(mapped + 100, bytes, 10) == 0);
    CHECK(munmap(mapped, 4096) == 0);
    close(fd);
    fd = create(path);
    for (int n = 0; n < 10; n++) CHECK(write(fd, bytes, 10) == 10);
    CHECK(flock(fd, LOCK_EX) == 0);
    other = open(path, O_RDWR);
    CHECK(flock(other, LOCK_EX | LOCK_NB) == -1 && errno == EWOULDBLOCK);
    close(fd);
    CHECK(flock(other, LOCK_EX | LOCK_NB) == 0);
    close(other);
    fd = create(path);
    for (int n = 0; n < 10; n++) CHECK(write(fd, bytes, 10) == 10);
    CHECK(write(fd, 0, 0) == 0 && lseek(fd, -1, SEEK_SET) == -1 && errno == EINVAL);
    CHECK(fcntl(fd, F_SETFL, O_APPEND) == 0);
    CHECK(lseek(fd, 0, SEEK_SET) == 0 && write(fd, bytes, 10) == 10 && lseek(fd, 0, SEEK_CUR) == 110);
    close(fd);
    fd = create(path);
    for (int n = 0; n < 10; n++) CHECK(write(fd, bytes, 10) == 10);
    CHECK(write(-1, bytes, 1) == -1 && errno == EBADF);
    CHECK(dup2(fd, 90) == 90 && close(fd) == 0 && write(90, bytes, 10) == 10 && lseek(90, 0, SEEK_CUR) == 110);
    CHECK(close_range(80, 100, 0) == 0 && write(90, bytes, 1) == -1 && errno == EBADF);
    struct stat st;
    CHECK(stat(path, &st) == 0 && st.st_size == 110);
    /* The file can be executed as soon as it is closed: nobody has it open to write. */
    char self[4096];
    FILE *from = fopen("/bin/true", "r"), *to = fopen(path, "w");
    setvbuf(to, self, _IOFBF, 512);
    for (int byte; (byte = getc(from)) != EOF;) putc(byte, to);
    CHECK(fclose(to) == 0 && chmod(path, 0755) == 0);
    pid_t pid = fork();
    if (pid == 0) execl(path, path, (char *)0), _exit(errno);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    fd = create(path);
    CHECK(setrlimit(RLIMIT_FSIZE, &(struct rlimit){ 100, 100 }) == 0);
    signal(SIGXFSZ, SIG_IGN);
    for (int n = 0; n < 10; n++) CHECK(write(fd, bytes, 10) == 10);
    CHECK(write(fd, bytes, 10) == -1 && errno == EFBIG);
    close(fd);
}

/* Until the file system takes no more, with this error: who is told, and when. */
static void full(const char *path, int expected, long len) {
    int fd = create(path);
    char *bytes = malloc(len);
    memset(bytes, 7, len);
    long count = 0;
    int errors = 0;
    /* More than may be pending. */
    for (; count < 10000000 && !errors; count++)
        if (write(fd, bytes, len) != len) errors = errno;
    CHECK(errors == expected);
    /* What is missing stays missing: every fsync says so, also of who opens the file later. */
    int other = open(path, O_RDWR);
    for (int n = 0; n < 2; n++) {
        CHECK(fsync(fd) == -1 && errno == expected);
        CHECK(fdatasync(other) == -1 && errno == expected);
    }
    CHECK(close(other) == 0);
    CHECK(ftruncate(fd, 0) == 0 && lseek(fd, 0, SEEK_SET) == 0);
    for (int n = 0; n < 10; n++) CHECK(write(fd, bytes, 10) == 10);
    CHECK(fsync(fd) == 0 && close(fd) == 0);
    printf("told once\n");
}

/* What is missing is not shown as if it had never been written. */
static void shown(const char *path) {
    int fd = create(path);
    char bytes[512] = { 7 };
    struct stat st;
    do CHECK(write(fd, bytes, sizeof bytes) == sizeof bytes);
    while (fstat(fd, &st) == 0);
    CHECK(errno == ENOSPC && fstat(fd, &st) == -1 && errno == ENOSPC && lseek(fd, 0, SEEK_END) == -1 && errno == ENOSPC);
    CHECK(write(fd, bytes, sizeof bytes) == -1 && errno == ENOSPC && fstat(fd, &st) == 0);
    printf("shown\n");
}

/* Ends without a look at what it has written, for which there is room of a page: at the end of the process, by a descriptor put in its place, or by a range of them. */
static void untold(const char *path, long how) {
    int fd = create(path), other;
    char bytes[8192] = { 7 };
    /* The first is written at once. */
    CHECK(write(fd, bytes, 1) == 1 && write(fd, bytes, sizeof bytes) == sizeof bytes);
    if (how == 1) {
        CHECK((other = open("/dev/null", O_WRONLY)) >= 0);
        CHECK(dup2(other, fd) == -1 && errno == ENOSPC);
        CHECK(write(fd, bytes, sizeof bytes) == sizeof bytes && close(fd) == 0);
    }
    if (how == 2) CHECK(close_range(fd, fd, 0) == 0);
    if (how == 3) CHECK(close(fd) == -1 && errno == ENOSPC);
}

#include "closing.h"

/* Reads what was written, piece by piece, computes for so many us at each, and writes a piece of the result. */
static void pipeline(const char *path, long count, int microseconds, int size) {
    char other[4096], *bytes = malloc(size);
    snprintf(other, sizeof other, "%s.out", path);
    int from = open(path, O_RDONLY), to = create(other);
    CHECK(from >= 0);
    double begin = now(), reading = 0, writing = 0, computing = 0;
    for (long n = 0; n < count; n++) {
        double start = now();
        CHECK(read(from, bytes, size) == size);
        double read_it = now();
        while (now() - read_it < microseconds * 1e-6)
            ;
        double computed = now();
        CHECK(write(to, bytes, size) == size);
        reading += read_it - start, computing += computed - read_it, writing += now() - computed;
    }
    double closing = now();
    CHECK(close(to) == 0);
    printf("%.3f s: read %.3f, compute %.3f, write %.3f, close %.3f\n", now() - begin, reading, computing, writing, now() - closing);
}

int main(int count, char **words) {
    CHECK(count >= 3);
    const char *mode = words[1], *path = words[2];
    long number = count > 3 ? atol(words[3]) : 0;
    if (!strcmp(mode, "pieces")) pieces(path, number, atoi(words[4]));
    else if (!strcmp(mode, "forever")) forever(path, words[3], atol(words[4]), count > 5 ? atol(words[5]) : 8);
    else if (!strcmp(mode, "bulk")) seed = number * 2 + 1, bulk(path, atol(words[4]));
    else if (!strcmp(mode, "records")) records(path, number, atol(words[4]));
    else if (!strcmp(mode, "turns")) turns(path, number, atol(words[4]));
    else if (!strcmp(mode, "random")) seed = number * 2 + 1, random_steps(path, atol(words[4]));
    else if (!strcmp(mode, "signals")) signals(path, number);
    else if (!strcmp(mode, "threads")) threads(path);
    else if (!strcmp(mode, "two")) two(path);
    else if (!strcmp(mode, "special")) special(path);
    else if (!strcmp(mode, "crowd")) crowd(path);
    else if (!strcmp(mode, "shown")) shown(path);
    else if (!strcmp(mode, "untold")) untold(path, number);
    else if (!strcmp(mode, "late")) late(path, number);
    else if (!strcmp(mode, "locked")) locked(path, number, words[4]);
    else if (!strcmp(mode, "full")) full(path, number ? number : ENOSPC, count > 4 ? atol(words[4]) : 512);
    else if (!strcmp(mode, "pipeline")) pipeline(path, number, atoi(words[4]), atoi(words[5]));
    else if (!strcmp(mode, "large")) large(path, number, atoi(words[4]));
    else if (!strcmp(mode, "many")) crew = count > 6 ? atoi(words[6]) : 1, seed = number * 2 + 1, many(path, atol(words[4]), atoi(words[5]), words[0]);
    else if (!strcmp(mode, "one")) {
        seed = number * 2 + 1;
        one_of_many(path, atol(words[4]), atoi(words[5]), atoi(words[6]), words[0]);
        return 0;
    }
    else return 2;
    printf("right\n");
    return 0;
}
