/* A program with more memory than it may keep: argv[1] says what it does, argv[2] how many MB it has. Prints "right" at the end, and the largest resident set in
 * kB before that. Everything is checked against what it must be. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "checked.h"

static size_t bytes;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* STREAM's last kernel. */
static void triad(void)
{
    size_t n = bytes / 24, i;
    double *a = malloc(n * 8), *b = malloc(n * 8), *c = malloc(n * 8), best = 0;
    int r;
    for (i = 0; i < n; i++)
        a[i] = 0, b[i] = i, c[i] = 2.0 * i;
    for (r = 0; r < 4; r++) {
        double begun = now(), took;
        for (i = 0; i < n; i++)
            a[i] = b[i] + (r + 3.0) * c[i];
        took = now() - begun;
        if (24e-6 * n / took > best)
            best = 24e-6 * n / took;
    }
    for (i = 0; i < n; i++)
        check(a[i] == i + 6.0 * (2.0 * i), "a sum");
    printf("triad %.0f MB/s\n", best);
}

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void sort(void)
{
    size_t n = bytes / 8, i;
    uint64_t *a = malloc(n * 8), sum = 0, again = 0;
    for (i = 0; i < n; i++)
        sum += a[i] = mix(i);
    qsort(a, n, 8, compare);
    for (i = 0; i < n; i++) {
        again += a[i];
        check(i == 0 || a[i - 1] <= a[i], "the order");
    }
    check(sum == again, "the sum");
}

/* Single pages, everywhere. */
static void scatter(void)
{
    size_t n = bytes / 8, i, steps = 10000;
    uint64_t *a = calloc(n, 8), x = 1;
    double begun;
    for (i = 0; i < n; i++)
        a[i] = i;
    begun = now();
    for (i = 0; i < steps; i++) {
        x = mix(x);
        a[x % n] ^= x;
    }
    printf("scatter %.1f us\n", (now() - begun) / steps * 1e6);
    for (i = 0, x = 1; i < steps; i++) {
        x = mix(x);
        a[x % n] ^= x;
    }
    for (i = 0; i < n; i++)
        check(a[i] == i, "a word");
}

/* Small and middle-sized pieces that come and go, on the heap and beside it. */
static void heap(void)
{
    enum { SLOTS = 20000 };
    static struct { uint64_t *at; size_t n; uint64_t seed; } slot[SLOTS];
    size_t mean = bytes / SLOTS / 8, i, k, round;
    for (round = 0; round < 3; round++)
        for (i = 0; i < SLOTS; i++) {
            uint64_t r = mix(i * 3 + round);
            size_t n = 1 + (r % 97 == 0 ? mean * 40 : r % (mean * 2));
            for (k = 0; k < slot[i].n; k++)
                check(slot[i].at[k] == slot[i].seed + k, "a piece");
            if (r % 3 == 0) {
                free(slot[i].at);
                slot[i].at = malloc(n * 8);
            } else {
                size_t both = n < slot[i].n ? n : slot[i].n;
                slot[i].at = realloc(slot[i].at, n * 8);
                for (k = 0; k < both; k++)
                    check(slot[i].at[k] == slot[i].seed + k, "a piece made longer or shorter");
            }
            slot[i].n = n, slot[i].seed = r;
            for (k = 0; k < n; k++)
                slot[i].at[k] = r + k;
        }
    char *p = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(p, 7, bytes);
    check(madvise(p + 4096, bytes - 8192, MADV_DONTNEED) == 0, "madvise");
    for (i = 4096; i < bytes - 8192; i += 4096)
        check(p[i] == 0, "what was given up is zero");
    check(p[0] == 7, "what was kept");
    check(munmap(p, bytes / 2 / 4096 * 4096) == 0 && p[bytes - 1] == 7, "half of it");
}

/* The kernel reads and writes memory that is away. */
static void calls(void)
{
    char *a = malloc(bytes), *b = malloc(bytes), name[] = "/tmp/hpcrt-test.XXXXXX";
    size_t i, done;
    int fd = mkstemp(name), pipes[2];
    unlink(name);
    for (i = 0; i < bytes; i += 8)
        *(uint64_t *)(a + i) = mix(i);
    memset(b, 1, bytes);
    for (done = 0; done < bytes;) {
        ssize_t n = write(fd, a + done, bytes - done);
        check(n > 0, "write");
        done += n;
    }
    check(pread(fd, b, bytes, 0) == (ssize_t)bytes, "one read of a file gives all of it");
    check(memcmp(a, b, bytes) == 0, "what was read");
    memset(b, 2, bytes);
    struct iovec parts[3] = {{b + 5, 3000}, {b + bytes / 2, 70000}, {b + bytes - 9000, 9000}};
    check(lseek(fd, 0, SEEK_SET) == 0 && readv(fd, parts, 3) == 82000, "readv");
    check(!memcmp(b + 5, a, 3000) && !memcmp(b + bytes / 2, a + 3000, 70000), "what readv read");
    check(!memcmp(b + bytes - 9000, a + 73000, 9000), "what readv read last");
    check(pipe(pipes) == 0, "pipe");
    for (i = 0; i + 50000 < bytes; i += bytes / 37) {
        check(write(pipes[1], a + i, 50000) == 50000, "write into a pipe");
        for (done = 0; done < 50000;) {
            ssize_t n = read(pipes[0], b + i + done, 50000 - done);
            check(n > 0, "read from a pipe");
            done += n;
        }
        check(!memcmp(b + i, a + i, 50000), "what came through the pipe");
    }
    struct timespec *t = (struct timespec *)(b + bytes / 3 / 8 * 8);
    memset(b, 3, bytes);
    check(clock_gettime(CLOCK_THREAD_CPUTIME_ID, t) == 0 && t->tv_nsec < 1000000000, "a time");
    strcpy(a + bytes / 3, "/proc/self/status");
    memset(b, 3, bytes);
    check(open(a + bytes / 3, O_RDONLY) >= 0, "a path");
    FILE *f = fopen("/dev/zero", "r");
    check(fread(b, 1, bytes, f) == bytes && b[bytes / 2] == 0, "fread");
}

/* Rows whose length is no whole number of pages, a cell of each in turn, forwards and backwards; some of them in two pages. */
static void columns(void)
{
    enum { WORDS = 4875, CELL = 75 };
    size_t rows = bytes / 8 / WORDS, cell, row, i;
    uint64_t *a = malloc(rows * WORDS * 8);
    for (i = 0; i < rows * WORDS; i++)
        a[i] = mix(i);
    for (cell = 0; cell < WORDS / CELL; cell++)
        for (row = 0; row < rows; row++) {
            size_t from = (cell % 2 ? rows - 1 - row : row) * WORDS + cell * CELL;
            for (i = from; i < from + CELL; i++)
                check(a[i]++ == mix(i), "a word of a column");
        }
    for (i = 0; i < rows * WORDS; i++)
        check(a[i] == mix(i) + 1, "a word of a row");
}

static void *part(void *argument)
{
    size_t which = (size_t)argument, n = bytes / 8 / 4, i, r;
    uint64_t *a = malloc(n * 8);
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, 0);
    for (r = 0; r < 3; r++)
        for (i = 0; i < n; i++)
            a[i] = r ? a[i] + mix(i) * which : mix(i);
    for (i = 0; i < n; i++)
        check(a[i] == mix(i) * (1 + 2 * which), "a thread's word");
    int fd = open("/dev/zero", O_RDONLY);
    check(read(fd, a, 10000) == 10000 && a[0] == 0 && a[2000] != 0, "a thread's read");
    return a;
}

static void threads(void)
{
    pthread_t all[4];
    size_t i;
    for (i = 0; i < 4; i++)
        check(pthread_create(&all[i], 0, part, (void *)i) == 0, "pthread_create");
    for (i = 0; i < 4; i++)
        pthread_join(all[i], 0);
}

/* Memory that is reserved first and made accessible later, protected, and taken back. */
static void reserve(void)
{
    size_t n = bytes, i, half = n / 2 / 4096 * 4096, step = n / 8 / 4096 * 4096;
    char *a = mmap(0, 4 * n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check(a != MAP_FAILED, "mmap");
    check(munmap(a + 2 * n + 8192, 2 * n - 8192) == 0, "munmap of a part");
    for (i = 0; i < n; i += step)
        check(mprotect(a + i, n - i < step ? n - i : step, PROT_READ | PROT_WRITE) == 0, "mprotect");
    for (i = 0; i < n; i += 8)
        *(uint64_t *)(a + i) = mix(i);
    check(mprotect(a + 8192, n / 8, PROT_READ) == 0 && mprotect(a + half, 40960, PROT_NONE) == 0, "mprotect again");
    char *b = malloc(half);
    memset(b, 1, half);
    for (i = 0; i < half; i += 8)
        check(*(uint64_t *)(a + i) == mix(i), "a word that cannot be written");
    check(mprotect(a, n, PROT_READ | PROT_WRITE) == 0, "mprotect back");
    for (i = 0; i < n; i += 8)
        check(*(uint64_t *)(a + i) == mix(i), "a word that could not be reached");
    check(mmap(a, half, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == a, "mmap over it");
    check(mmap(a, half, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == a, "mmap over that");
    for (i = 0; i < half; i += 8)
        check(*(uint64_t *)(a + i) == 0, "a word that is new");
    int fd = open("/proc/self/exe", O_RDONLY);
    check(mmap(a + half, 8192, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0) == a + half && !memcmp(a + half, "\177ELF", 4), "a file over it");
    check(*(uint64_t *)(a + half + 8192) == mix(half + 8192), "a word behind the file");
    check(munmap(a, 2 * n + 8192) == 0, "munmap");
    for (b = 0, i = 0; i < 3; i++) {
        b = mmap(b, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (size_t k = 0; k < n; k += 4096)
            check(b[k] == 0, "fresh memory"), b[k] = 1;
    }
}

/* What a program executes may leave anything in registers that a system call does not read, and give it any numbers. */
static void numbers(void)
{
    long any = 0x680012345678;
    check(syscall(SYS_getppid, any, any, any, any, any, any) > 0, "a call with what was left in registers");
    check(syscall(SYS_prctl, 3 /* PR_GET_DUMPABLE */, 0, any, any, any, any) >= 0, "a call of which libraries pass on what was left");
    check(syscall(SYS_lseek, -1, any, any, any, any, any) < 0 && errno == EBADF, "a call with a number");
}

/* Other programs are started while memory is away, one of them linked statically; every descriptor is closed. */
static void children(void)
{
    size_t n = bytes / 8, i;
    uint64_t *a = malloc(n * 8);
    for (i = 0; i < n; i++)
        a[i] = mix(i);
    check(system("test \"$(echo x | cat)\" = x && ls / > /dev/null") == 0, "system");
    check(system("\"$(dirname \"$(readlink /proc/$PPID/exe)\")\"/numbers numbers > /dev/null") == 0, "a program whose calls have numbers");
    for (i = 3; i < 1024; i++)
        close(i);
    for (i = 0; i < n; i++)
        check(a[i] == mix(i), "a word");
}

static uint64_t *common;

/* Every word as it began and with what was added to every `step`th of them. */
static void check_common(size_t n, const uint64_t *added, const char *what)
{
    size_t i;
    for (i = 0; i < n; i++)
        check(common[i] == mix(i) + (i % 2 ? 0 : added[2]) + (i % 3 ? 0 : added[3]) + (i % 1000 ? 0 : added[4]), what);
}

static void add_common(size_t n, size_t step, uint64_t value)
{
    size_t i;
    for (i = 0; i < n; i += step)
        common[i] += value;
}

static volatile int ended;

static void *beside(void *argument)
{
    size_t n = bytes / 8 / 4, i, r;
    uint64_t *a = malloc(n * 8);
    (void)argument;
    for (r = 0; !ended; r++)
        for (i = 0; i < n; i++) {
            check(r == 0 || a[i] == mix(i) + r - 1, "a word of a thread beside");
            a[i] = mix(i) + r;
        }
    return 0;
}

static void ended_well(pid_t pid, const char *what)
{
    int status;
    check(waitpid(pid, &status, 0) == pid && status == 0, what);
}

/* Both sides of a fork write what they had in common, and nobody sees the other's. */
static void forks(void)
{
    size_t n = bytes / 8, i, round;
    pthread_t thread;
    int pipes[2];
    char byte = 0;
    common = malloc(n * 8);
    for (i = 0; i < n; i++)
        common[i] = mix(i);
    check(pthread_create(&thread, 0, beside, 0) == 0, "pthread_create");
    uint64_t added[5] = {0};
    for (round = 0; round < 2; round++) {
        pid_t pid = fork();
        check(pid >= 0, "fork");
        if (pid == 0) {
            add_common(n, 3, 7), added[3] += 7;
            pid_t second = fork();
            check(second >= 0, "fork in a child");
            add_common(n, 2, 100 + second), added[2] += 100 + second;
            check_common(n, added, second ? "a word of a child" : "a word of a child's child");
            if (second)
                ended_well(second, "a child's child");
            free(common);
            common = malloc(n * 8);
            check(common != 0, "malloc in a child");
            for (i = 0; i < n; i++)
                common[i] = i;
            for (i = 0; i < n; i++)
                check(common[i] == i, "a new word of a child");
            _exit(0);
        }
        add_common(n, 1000, 3), added[4] += 3;
        check_common(n, added, "a word of the parent");
        ended_well(pid, "the child");
    }
    for (i = 0; i < 20; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            execl("/bin/true", "true", (char *)0);
            _exit(1);
        }
        ended_well(pid, "a program that is executed");
    }
    /* One whose parent does not wait. */
    check(pipe(pipes) == 0, "pipe");
    pid_t pid = fork();
    if (pid == 0) {
        if (fork() > 0)
            _exit(0);
        usleep(100000);
        check_common(n, added, "an orphan's word");
        check(write(pipes[1], "!", 1) == 1, "write");
        _exit(0);
    }
    ended_well(pid, "one that does not wait");
    close(pipes[1]);
    add_common(n, 1, 1);
    check(read(pipes[0], &byte, 1) == 1 && byte == '!', "an orphan");
    ended = 1;
    pthread_join(thread, 0);
}

/* Goes over its memory again and again, until it is ended. */
static void laps(void)
{
    size_t n = bytes / 8, i;
    uint64_t *a = malloc(n * 8), lap;
    for (i = 0; i < n; i++)
        a[i] = mix(i);
    for (lap = 0;; lap++)
        for (i = 0; i < n; i++)
            check(a[i]++ == mix(i) + lap, "a word of a lap");
}

/* Looks at what it wrote once, until it is ended. */
static void looks(void)
{
    size_t n = bytes / 8, i;
    uint64_t *a = malloc(n * 8);
    for (i = 0; i < n; i++)
        a[i] = mix(i);
    for (;;)
        for (i = 0; i < n; i++)
            check(a[i] == mix(i), "a word that is looked at");
}

/* The kernel has some of it in a swap device when it is given away. */
static void swap(void)
{
    size_t n = bytes / 8, i, round;
    uint64_t *a = malloc(n * 8);
    for (i = 0; i < n; i++)
        a[i] = mix(i);
    for (round = 0; round < 2; round++)
        for (i = 0; i < n; i++) {
            check(a[i] == mix(i), "a word that was in swap");
            /* What was looked at last: a MiB. */
            if (i % (1 << 17) == 0 && i)
                syscall(SYS_madvise, ((uintptr_t)(a + i) - (1 << 20)) & -4096UL, 1 << 20, 21 /* MADV_PAGEOUT */);
        }
}

/* What is said of memory changes nothing of what is in it. */
static void hints(void)
{
    int advice[] = {MADV_SEQUENTIAL, MADV_RANDOM, MADV_WILLNEED, MADV_NORMAL};
    size_t n = bytes / 8, i, k;
    uint64_t *a = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (i = 0; i < n; i++)
        a[i] = mix(i);
    for (k = 0; k < 4; k++) {
        check(madvise((char *)a + 5 * 4096, bytes - 9 * 4096, advice[k]) == 0, "madvise");
        for (i = 0; i < n; i += k == 1 ? 1499 : 1)
            check(a[i] == mix(i), "a word of which something was said");
    }
}

/* Processors that this thread may use now, as the kernel says where nobody else answers. */
static int held(void)
{
    char line[4096], *at;
    int count = 0;
    FILE *f = fopen("/proc/thread-self/status", "r");
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, "Cpus_allowed:", 13))
            for (at = line + 13; *at; at++)
                count += *at == ',' ? 0 : __builtin_popcountl(strtol((char[]){*at, 0}, 0, 16));
    fclose(f);
    return count;
}

/* Misses pages one by one until this thread and those that bring them use one processor. */
static void gather(uint64_t *a)
{
    size_t n = bytes / 8, i, round;
    for (round = 0; round < 400; round++) {
        for (i = 0; i < 4000; i++)
            a[mix(round * 4000 + i) % n]++;
        if (held() == 1)
            return;
    }
    check(0, "it uses one processor");
}

static int asked(void)
{
    cpu_set_t set;
    check(sched_getaffinity(0, sizeof set, &set) == 0, "sched_getaffinity");
    return CPU_COUNT(&set);
}

static void *tell(void *to)
{
    *(int *)to = held();
    return 0;
}

/* What a program says that is started now: by vfork, posix_spawn, or by a child that is gathered itself. */
static int started(uint64_t *a, int how)
{
    enum { VFORK, SPAWN };
    extern char **environ;
    char text[32] = "", *words[] = {"nproc", 0};
    int ends[2], status;
    pid_t pid;
    posix_spawn_file_actions_t actions;
    check(pipe(ends) == 0, "a pipe");
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    gather(a);
    if (how == SPAWN)
        check(posix_spawnp(&pid, "nproc", &actions, 0, words, environ) == 0, "posix_spawnp");
    else if (how == VFORK && (pid = vfork()) == 0)
        dup2(ends[1], 1), execlp("nproc", "nproc", (char *)0), _exit(1);
    else if (how != VFORK && (pid = fork()) == 0)
        gather(a), dup2(ends[1], 1), execlp("nproc", "nproc", (char *)0), _exit(1);
    close(ends[1]);
    check(read(ends[0], text, sizeof text - 1) > 0, "what it says");
    check(waitpid(pid, &status, 0) == pid && status == 0, "its end");
    close(ends[0]);
    posix_spawn_file_actions_destroy(&actions);
    return atoi(text);
}

/* Who is started inherits the processors of the thread that does, and who asks is told of them: as if all that brings pages were elsewhere. */
static void heirs(void)
{
    uint64_t *a = calloc(bytes / 8, 8);
    int all = asked(), theirs = 0, how;
    cpu_set_t one;
    pthread_t thread;
    if (all == 1)
        return;
    memset(a, 1, bytes);
    gather(a);
    check(asked() == all && held() == all, "what it is told");
    for (how = 0; how < 3; how++)
        check(started(a, how) == all, "what is started");
    gather(a);
    usleep(300000);
    check(held() == all, "at rest");
    gather(a);
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    check(sched_setaffinity(0, sizeof one, &one) == 0 && asked() == 1, "what it sets");
    for (how = 0; how < (int)sizeof one * 8; how++)
        CPU_SET(how, &one);
    check(sched_setaffinity(0, sizeof one, &one) == 0 && asked() >= all, "what it sets again");
    all = asked();
    gather(a);
    check(pthread_create(&thread, 0, tell, &theirs) == 0, "a thread");
    pthread_join(thread, 0);
    check(theirs == all, "a thread's");
}

int main(int argc, char **argv)
{
    struct { const char *name; void (*run)(void); } all[] = {{"triad", triad}, {"sort", sort}, {"scatter", scatter}, {"heap", heap},
        {"calls", calls}, {"threads", threads}, {"children", children}, {"forks", forks}, {"reserve", reserve},
        {"laps", laps}, {"looks", looks}, {"swap", swap}, {"numbers", numbers}, {"hints", hints},
        {"columns", columns}, {"heirs", heirs}};
    size_t i;
    bytes = argc > 2 ? (size_t)atol(argv[2]) * 1000000 / 4096 * 4096 : 0;
    for (i = 0; i < sizeof all / sizeof *all; i++)
        if (argc > 1 && !strcmp(argv[1], all[i].name)) {
            all[i].run();
            right();
            return 0;
        }
    return 2;
}
