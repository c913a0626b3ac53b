// System calls that are not libc's: what was written just before must be seen by them, wherever their instructions come from.
// LIBRARY: the object that is loaded late. Else: `code WAY FILE LIBRARY`.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef long (*Call)(long number, long a, long b, long c, long d);

#if defined(LIBRARY) || defined(OWN)
long raw(long number, long a, long b, long c, long d) {
    register long r10 __asm__("r10") = d;
    long result;
    __asm__ volatile("nop; syscall; nop" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return result;
}
#endif

#ifndef LIBRARY
enum { THREADS = 4, ROUNDS = 50 };
static Call call;
static const char *name;
static int go[2];
static volatile int faults;

static void check(int is, const char *what) {
    if (!is) {
        fprintf(stderr, "%s: %s\n", what, strerror(errno));
        faults++;
    }
}

// Writes by libc, and looks by `call`.
static void look(int who) {
    char path[4096], seen[64], written[64];
    snprintf(path, sizeof path, "%s.%d.%d", name, who, (int)getpid());
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600), reader = open(path, O_RDONLY);
    check(file >= 0 && reader >= 0, "open");
    for (int n = 0; n < ROUNDS; n++) {
        int len = snprintf(written, sizeof written, "%d of %d\n", n, who);
        off_t at = (off_t)n * 64;
        check(lseek(file, at, SEEK_SET) == at && write(file, written, len) == len, "write");
        check(call(SYS_pread64, reader, (long)seen, sizeof seen, at) == len && !memcmp(seen, written, len), "pread");
    }
    close(file);
    close(reader);
}

static void *wait_and_look(void *who) {
    long nth = (long)who;
    if (nth % 2) {
        struct pollfd until = {go[0], POLLIN, 0};
        check(poll(&until, 1, 20000) == 1, "poll");
    } else {
        struct timespec time = {0, 700000000};
        check(nanosleep(&time, NULL) == 0, "nanosleep");
        while (!call)
            sched_yield();
    }
    look((int)nth);
    return NULL;
}

// Memory that is written, and then executed.
static Call made(void) {
    // mov rax, rdi; mov rdi, rsi; mov rsi, rdx; mov rdx, rcx; mov r10, r8; syscall; ret
    static const unsigned char code[] = {0x48, 0x89, 0xf8, 0x48, 0x89, 0xf7, 0x48, 0x89, 0xd6, 0x48, 0x89, 0xca, 0x4d, 0x89, 0xc2, 0x0f, 0x05, 0xc3};
    void *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(memory, code, sizeof code);
    check(mprotect(memory, 4096, PROT_READ | PROT_EXEC) == 0, "mprotect");
    return (Call)memory;
}

static Call loaded(const char *library) {
    void *object = dlopen(library, RTLD_NOW);
    check(object != NULL, "dlopen");
    return object ? (Call)dlsym(object, "raw") : made();
}

static int child(void *who) {
    look((int)(long)who);
    _exit(faults);
}

static void ended(pid_t pid) {
    int status = -1;
    check(pid > 0 && waitpid(pid, &status, __WALL) == pid && status == 0, "a child");
}

int main(int argc, char **argv) {
    const char *way = argv[1];
    name = argv[2];
    setvbuf(stdout, NULL, _IONBF, 0);
    if (!strcmp(way, "threads") || !strcmp(way, "late")) {
        pthread_t threads[THREADS];
        check(pipe(go) == 0, "pipe");
        for (long n = 0; n < THREADS; n++)
            pthread_create(&threads[n], NULL, wait_and_look, (void *)n);
        usleep(200000);
        call = !strcmp(way, "late") ? loaded(argv[3]) : made();
        check(write(go[1], "x", 1) == 1, "pipe");
        look(THREADS);
        for (int n = 0; n < THREADS; n++)
            pthread_join(threads[n], NULL);
    } else if (!strcmp(way, "forked")) {
        call = made();
        pid_t pid = fork();
        if (!pid)
            child((void *)1);
        ended(pid);
        look(2);
    } else if (!strcmp(way, "cloned")) {
        call = (Call)syscall;
        look(0);
        pid_t pid = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
        if (!pid)
            child((void *)1);
        ended(pid);
        look(2);
#ifdef OWN
    } else if (!strcmp(way, "own")) {
        call = raw;
        look(0);
#endif
    } else {
        call = !strcmp(way, "loaded") ? loaded(argv[3]) : made();
        look(0);
    }
    puts(faults ? "wrong" : "right");
    return faults != 0;
}
#endif
