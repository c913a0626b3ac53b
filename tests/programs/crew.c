/* Threads that write files in every way at once, and say what came of it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { printf("line %d: %s: %s\n", __LINE__, #what, strerror(errno)); exit(1); } } while (0)
#define THREADS 5
#define RECORD 16
#define MOST (256 << 10)

static const char *top;
static char *self;
static long rounds;
/* Open files that all use: one with an offset, one that is appended to, one in which each has its own part, and a signal handler's. */
static int common, appended, parts, signalled;
static volatile long handled;

static int named(const char *name, int flags) {
    char path[4096];
    snprintf(path, sizeof path, "%s.%s", top, name);
    int fd = open(path, flags | O_CREAT | O_CLOEXEC, 0644);
    CHECK(fd >= 0);
    return fd;
}

static uint64_t draw(uint64_t *seed, uint64_t below) {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return *seed % below;
}

static void record(char *into, long which, long n) {
    char text[2 * RECORD];
    snprintf(text, sizeof text, "%03d%012d\n", (int)which, (int)n);
    memcpy(into, text, RECORD);
}

static void handler(int signal) {
    (void)signal;
    int before = errno;
    CHECK(write(signalled, "h", 1) == 1);
    __atomic_add_fetch(&handled, 1, __ATOMIC_SEQ_CST);
    errno = before;
}

/* A file of its own beside an array that says what it holds; and a part of what all have. */
static void *member(void *argument) {
    long which = (long)argument;
    uint64_t seed = which * 7919 + rounds;
    char name[16], line[RECORD], bytes[9000], *oracle = calloc(1, MOST + sizeof bytes), *back = malloc(MOST + sizeof bytes);
    snprintf(name, sizeof name, "own%ld", which);
    int fd = named(name, O_RDWR | O_TRUNC);
    off_t at = 0, size = 0;
    for (long n = 0; n < rounds; n++) {
        record(line, which, n);
        CHECK(write(common, line, RECORD) == RECORD);
        CHECK(write(appended, line, RECORD) == RECORD);
        CHECK(pwrite(parts, line, RECORD, (which * rounds + n) * RECORD) == RECORD);
        size_t len = draw(&seed, 30) ? 1 + draw(&seed, 200) : 1 + draw(&seed, sizeof bytes);
        memset(bytes, n + which, len);
        switch (draw(&seed, 12)) {
        case 0 ... 4:
            if (at + (off_t)len > MOST) CHECK(lseek(fd, at = 0, SEEK_SET) == 0);
            CHECK(write(fd, bytes, len) == (ssize_t)len);
            memcpy(oracle + at, bytes, len);
            at += len;
            if (at > size) size = at;
            break;
        case 5:
            at = draw(&seed, size + 1);
            CHECK(lseek(fd, at, SEEK_SET) == at);
            break;
        case 6: {
            ssize_t there = size - at < (off_t)len ? size - at : (off_t)len;
            CHECK(read(fd, back, len) == there && !memcmp(back, oracle + at, there));
            at += there;
            break;
        }
        case 7: {
            struct stat st;
            CHECK(fstat(fd, &st) == 0 && st.st_size == size);
            CHECK(pread(parts, line, RECORD, (which * rounds + n) * RECORD) == RECORD && atol(line + 3) == n);
            break;
        }
        case 8: {
            /* In the place of another descriptor, and back. */
            int other = dup(parts);
            CHECK(other >= 0 && dup2(fd, other) == other && close(fd) == 0);
            fd = other;
            break;
        }
        case 9:
            if (draw(&seed, 20)) break;
            CHECK(close(fd) == 0);
            fd = named(name, O_RDWR);
            at = 0;
            break;
        case 10: {
            if (draw(&seed, 100)) break;
            pid_t pid = fork();
            CHECK(pid >= 0);
            if (pid == 0) _exit(write(fd, bytes, 10) == 10 ? 0 : 1);
            int status;
            while (waitpid(pid, &status, 0) != pid) CHECK(errno == EINTR);
            CHECK(status == 0);
            memset(oracle + at, bytes[0], 10);
            at += 10;
            if (at > size) size = at;
            break;
        }
        case 11: {
            if (draw(&seed, 100)) break;
            pid_t pid;
            char *words[] = { "true", 0 };
            CHECK(posix_spawn(&pid, "/bin/true", 0, 0, words, 0) == 0);
            int status;
            while (waitpid(pid, &status, 0) != pid) CHECK(errno == EINTR);
            CHECK(status == 0);
            break;
        }
        }
    }
    CHECK(pread(fd, back, MOST + sizeof bytes, 0) == size && !memcmp(back, oracle, size));
    CHECK(close(fd) == 0);
    free(oracle);
    free(back);
    return 0;
}

/* Whole records, each thread's in order; the last of each, if it is given, is as many. */
static void in_order(int fd, long each) {
    char line[RECORD + 1] = { 0 };
    long next[1000] = { 0 };
    FILE *file = fdopen(fd, "r");
    CHECK(fseek(file, 0, SEEK_SET) == 0);
    while (fread(line, 1, RECORD, file) == RECORD) {
        long n = atol(line + 3);
        line[3] = 0;
        long which = atol(line);
        CHECK(line[RECORD - 1] == '\n' && which >= 0 && which < 1000 && n == next[which]);
        next[which]++;
    }
    CHECK(feof(file));
    for (long which = 0; each && which < THREADS; which++) CHECK(next[which] == each);
    CHECK(ftell(file) % RECORD == 0);
    fclose(file);
}

static void together(void) {
    common = named("common", O_RDWR | O_TRUNC);
    appended = named("appended", O_RDWR | O_TRUNC | O_APPEND);
    parts = named("parts", O_RDWR | O_TRUNC);
    signalled = named("signalled", O_RDWR | O_TRUNC);
    struct sigaction action = { .sa_handler = handler, .sa_flags = SA_RESTART }, was;
    CHECK(sigaction(SIGALRM, &action, 0) == 0 && sigaction(SIGALRM, 0, &was) == 0 && was.sa_handler == handler);
    struct itimerval every = { { 0, 200 }, { 0, 200 } };
    CHECK(setitimer(ITIMER_REAL, &every, 0) == 0);
    pthread_t all[THREADS];
    for (long n = 0; n < THREADS; n++) CHECK(pthread_create(&all[n], 0, member, (void *)n) == 0);
    for (int n = 0; n < THREADS; n++) CHECK(pthread_join(all[n], 0) == 0);
    CHECK(setitimer(ITIMER_REAL, &(struct itimerval){ 0 }, 0) == 0);
    struct stat st;
    CHECK(fstat(signalled, &st) == 0 && st.st_size == handled);
    CHECK(lseek(common, 0, SEEK_CUR) == THREADS * rounds * RECORD);
    char line[RECORD + 1] = { 0 };
    for (long n = 0; n < THREADS * rounds; n++)
        CHECK(pread(parts, line, RECORD, n * RECORD) == RECORD && atol(line + 3) == n % rounds);
    in_order(common, rounds);
    in_order(appended, rounds);
    CHECK(close(parts) == 0 && close(signalled) == 0);
}

static volatile int stop;
static pthread_mutex_t alone = PTHREAD_MUTEX_INITIALIZER;
static long counts[1000];

static void release(void *argument) {
    (void)argument;
    pthread_mutex_unlock(&alone);
}

/* Until it is cancelled in a write: with a lock that another one needs between its own. */
static void *cancelled(void *argument) {
    long which = (long)argument;
    char line[RECORD];
    for (;;) {
        record(line, which, counts[which]);
        pthread_mutex_lock(&alone);
        pthread_cleanup_push(release, 0);
        if (write(common, line, RECORD) == RECORD) counts[which]++;
        pthread_cleanup_pop(1);
    }
    return 0;
}

static void *ongoing(void *argument) {
    long which = (long)argument;
    char line[RECORD];
    while (!stop) {
        record(line, which, counts[which]++);
        CHECK(write(appended, line, RECORD) == RECORD);
        pthread_mutex_lock(&alone);
        pthread_mutex_unlock(&alone);
    }
    return 0;
}

static void cancel(void) {
    common = named("common", O_RDWR | O_TRUNC | O_APPEND);
    appended = named("appended", O_RDWR | O_TRUNC | O_APPEND);
    pthread_t other, one;
    CHECK(pthread_create(&other, 0, ongoing, (void *)999) == 0);
    uint64_t seed = 5;
    for (long n = 0; n < rounds && n < 999; n++) {
        void *result;
        CHECK(pthread_create(&one, 0, cancelled, (void *)n) == 0);
        usleep(draw(&seed, 600));
        CHECK(pthread_cancel(one) == 0 && pthread_join(one, &result) == 0 && result == PTHREAD_CANCELED);
    }
    stop = 1;
    CHECK(pthread_join(other, 0) == 0);
    struct stat st;
    long least = 0;
    for (long n = 0; n < 999; n++) least += counts[n];
    /* One that was under way may be there. */
    CHECK(fstat(common, &st) == 0 && st.st_size >= least * RECORD && st.st_size <= (least + rounds) * RECORD);
    in_order(common, 0);
    in_order(appended, 0);
}

static void *executes(void *argument) {
    (void)argument;
    usleep(20000);
    execl(self, self, "after", top, (char *)0);
    CHECK(!"executed");
}

/* One executes a program while others write: what had been written is there. */
static void executed(void) {
    common = named("common", O_RDWR | O_TRUNC);
    appended = named("appended", O_RDWR | O_TRUNC | O_APPEND);
    pthread_t all[THREADS], one;
    CHECK(pthread_create(&one, 0, executes, 0) == 0);
    for (long n = 0; n < THREADS; n++) CHECK(pthread_create(&all[n], 0, ongoing, (void *)n) == 0);
    pthread_join(one, 0);
}

static void *idle(void *argument) {
    for (;;) pause();
    return argument;
}

/* Ends while a handler writes again and again; with another thread, or alone. */
static void alarmed(void) {
    signalled = named("signalled", O_RDWR | O_TRUNC);
    struct sigaction action = { .sa_handler = handler, .sa_flags = SA_RESTART }, was;
    CHECK(sigaction(SIGALRM, &action, 0) == 0 && sigaction(SIGALRM, 0, &was) == 0);
    CHECK(was.sa_handler == handler && !(was.sa_flags & SA_SIGINFO));
    pthread_t one;
    if (rounds) CHECK(pthread_create(&one, 0, idle, 0) == 0);
    struct itimerval every = { { 0, 50 }, { 0, 50 } };
    CHECK(setitimer(ITIMER_REAL, &every, 0) == 0);
    while (handled < 30) {}
}

/* Children that borrow the memory write to a file which is closed when they execute a program, while a thread does. */
static void borrowed(void) {
    appended = named("appended", O_RDWR | O_TRUNC);
    pthread_t other;
    CHECK(pthread_create(&other, 0, ongoing, (void *)0) == 0);
    for (long n = 0; n < rounds; n++) {
        char line[RECORD];
        record(line, 1, n);
        pid_t pid = vfork();
        if (pid == 0) {
            if (write(appended, line, RECORD) != RECORD) _exit(1);
            if (n % 10) _exit(0);
            execl("/bin/true", "true", (char *)0);
            _exit(1);
        }
        int status;
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
        usleep(200);
    }
    stop = 1;
    CHECK(pthread_join(other, 0) == 0);
    CHECK(lseek(appended, 0, SEEK_END) == (counts[0] + rounds) * RECORD);
    in_order(appended, 0);
}

static volatile sig_atomic_t called;

static void once(int signal) {
    (void)signal;
    called++;
}

static void *caller(void *argument) {
    for (long n = 0; n < 2000; n++) {
        struct sigaction action = { .sa_handler = once, .sa_flags = SA_RESETHAND };
        CHECK(sigaction(SIGUSR1, &action, 0) == 0 && pthread_kill((pthread_t)argument, SIGUSR1) == 0);
        while (called <= n) {}
    }
    return 0;
}

/* A handler that is to be called once is, wherever its thread is then. */
static void one_shot(void) {
    appended = named("appended", O_RDWR | O_TRUNC | O_APPEND);
    pthread_t one;
    CHECK(pthread_create(&one, 0, caller, (void *)pthread_self()) == 0);
    char line[RECORD];
    for (long n = 0; called < 2000; n++) {
        record(line, 0, n);
        CHECK(write(appended, line, RECORD) == RECORD);
    }
    CHECK(pthread_join(one, 0) == 0 && close(appended) == 0);
}

#ifdef _OPENMP
static void parallel(void) {
    parts = named("parts", O_RDWR | O_TRUNC);
    #pragma omp parallel for num_threads(4) schedule(dynamic, 7)
    for (long n = 0; n < rounds; n++) {
        char line[RECORD];
        record(line, n % 100, n);
        CHECK(pwrite(parts, line, RECORD, n * RECORD) == RECORD);
    }
    char line[RECORD + 1] = { 0 };
    for (long n = 0; n < rounds; n++) CHECK(pread(parts, line, RECORD, n * RECORD) == RECORD && atol(line + 3) == n);
    CHECK(close(parts) == 0);
}
#endif

int main(int count, char **words) {
    CHECK(count >= 3);
    const char *mode = words[1];
    self = words[0];
    top = words[2];
    rounds = count > 3 ? atol(words[3]) : 0;
    if (!strcmp(mode, "together")) together();
    else if (!strcmp(mode, "cancel")) cancel();
    else if (!strcmp(mode, "execute")) executed();
    else if (!strcmp(mode, "alarmed")) alarmed();
    else if (!strcmp(mode, "once")) one_shot();
    else if (!strcmp(mode, "borrow")) borrowed();
    else if (!strcmp(mode, "after")) in_order(named("appended", O_RDONLY), 0);
#ifdef _OPENMP
    else if (!strcmp(mode, "parallel")) parallel();
#endif
    else return 2;
    printf("right\n");
    return 0;
}
