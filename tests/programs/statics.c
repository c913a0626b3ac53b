/* A program whose memory is static arrays: 40 MB of its own that are zero at first, 5 MB that are not, and 8 MB of a library (this file with -DLIBRARY). Prints "right"
 * at the end, and the largest resident set in kB before that. Everything is checked against what it must be. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "checked.h"

enum { OTHER = 1 << 20 };
#ifdef LIBRARY
uint64_t other[OTHER];
uint64_t *others(void)
{
    return other;
}
#else
enum { WORDS = 5 << 20, FILLED = 1 << 19, PLACES = 1 << 17, LINES = 1 << 14 };
static uint64_t words[WORDS];
static char lines[LINES][64];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
extern uint64_t *others(void), filled[FILLED], *places[PLACES];
extern char **environ;
__asm__(".data\n.balign 8\nfilled: .set i, 0\n.rept 1 << 19\n.quad i * 0x9e3779b97f4a7c15\n.set i, i + 1\n.endr\n"
        "places: .rept 1 << 17\n.quad filled + 8\n.endr\n.text\n");

/* What the file says, with what was added to all. */
static void check_filled(uint64_t added)
{
    size_t i;
    for (i = 0; i < FILLED; i++)
        check(filled[i] == i * 0x9e3779b97f4a7c15 + added, "a word of the file");
    for (i = 0; i < PLACES; i++)
        check(places[i] == &filled[1], "an address of the file");
}

static void check_words(uint64_t added, const char *what)
{
    size_t i;
    uint64_t *other = others();
    for (i = 0; i < WORDS; i++)
        check(words[i] == mix(i) + added, what);
    for (i = 0; i < OTHER; i++)
        check(other[i] == mix(i) + added, what);
}

static void add(uint64_t more)
{
    size_t i;
    uint64_t *other = others();
    for (i = 0; i < WORDS; i++)
        words[i] += more;
    for (i = 0; i < FILLED; i++)
        filled[i] += more;
    for (i = 0; i < OTHER; i++)
        other[i] += more;
}

/* The kernel reads and writes what is away. */
static void calls(void)
{
    char name[] = "/tmp/hpcrt-test.XXXXXX", *a = (char *)words;
    size_t done, size = sizeof words;
    int fd = mkstemp(name), pipes[2], status;
    pid_t pid;
    unlink(name);
    for (done = 0; done < size;) {
        ssize_t n = write(fd, a + done, size - done);
        check(n > 0, "write");
        done += n;
    }
    check(pread(fd, others(), sizeof(uint64_t) * OTHER, 0) == sizeof(uint64_t) * OTHER, "pread into a library's");
    memset(words, 1, sizeof words);
    struct iovec parts[2] = {{a + 5, 3000}, {a + size / 2, 70000}};
    check(preadv(fd, parts, 2, 0) == 73000, "preadv");
    memset(lines, 1, sizeof lines);
    check(pread(fd, a, size, 0) == (ssize_t)size, "one read of a file gives all of it");
    check_words(7, "what was written and read");
    check(pipe(pipes) == 0, "pipe");
    for (done = 0; done + 5000 < size; done += size / 37) {
        check(write(pipes[1], a + done, 5000) == 5000, "write into a pipe");
        check(read(pipes[0], lines, 5000) == 5000, "read from a pipe");
        check(!memcmp(a + done, lines, 5000), "what came through the pipe");
    }
    /* Strings and what tells of others, one a page. */
    strcpy(lines[64], "/bin/sh"), strcpy(lines[128], "-c"), strcpy(lines[192], "test \"$A\" = $((1 + 1))"), strcpy(lines[256], "A=2");
    char **argv = (char **)lines[320], **envp = (char **)lines[384];
    argv[0] = lines[64], argv[1] = lines[128], argv[2] = lines[192], argv[3] = 0;
    envp[0] = lines[256], envp[1] = 0;
    check_words(7, "before a program is started");
    check(posix_spawn(&pid, lines[64], 0, 0, argv, envp) == 0, "posix_spawn");
    check(waitpid(pid, &status, 0) == pid && status == 0, "a program that was spawned");
    check_words(7, "before another is started");
    pid = vfork();
    if (pid == 0) {
        execve(lines[64], argv, envp);
        _exit(1);
    }
    check(waitpid(pid, (int *)lines[448], 0) == pid && *(int *)lines[448] == 0, "one that was executed");
    check_words(7, "before the last is started");
    check(system(lines[192]) != 0 && setenv("A", "2", 1) == 0 && system(lines[192]) == 0, "system");
    struct timespec *t = (struct timespec *)lines[512];
    check(clock_gettime(CLOCK_THREAD_CPUTIME_ID, t) == 0 && t->tv_nsec < 1000000000, "a time");
}

static uint64_t shared[4096 * 4];

static void *part(void *argument)
{
    size_t which = (size_t)argument, i;
    for (i = which; i < WORDS; i += 4)
        words[i] += 3;
    for (i = 0; i < 20000; i++) {
        pthread_mutex_lock(&lock);
        shared[i % 4 * 4096]++;
        pthread_mutex_unlock(&lock);
    }
    return 0;
}

static void both_sides(void)
{
    int status;
    size_t i;
    pid_t pid = fork();
    check(pid >= 0, "fork");
    add(pid ? 1 : 2);
    check_words(pid ? 11 : 12, "after a fork");
    check_filled(pid ? 8 : 9);
    for (i = 0; i < 4; i++)
        check(shared[i * 4096] == 20000, "what threads counted");
    if (pid == 0)
        _exit(0);
    check(waitpid(pid, &status, 0) == pid && status == 0, "the child");
}

int main(void)
{
    pthread_t all[4];
    uint64_t *other = others();
    size_t i;
    for (i = 0; i < WORDS; i++)
        check(words[i] == 0, "what is zero at first");
    check_filled(0);
    for (i = 0; i < WORDS; i++)
        words[i] = mix(i);
    for (i = 0; i < OTHER; i++)
        other[i] = mix(i);
    add(7);
    check_words(7, "after a sum");
    check_filled(7);
    calls();
    for (i = 0; i < 4; i++)
        check(pthread_create(&all[i], 0, part, (void *)i) == 0, "pthread_create");
    for (i = 0; i < 4; i++)
        pthread_join(all[i], 0);
    for (i = 0; i < OTHER; i++)
        other[i] += 3;
    check_words(10, "after threads");
    both_sides();
    char *middle = (char *)words + sizeof words / 4;
    middle += 4096 - (uintptr_t)middle % 4096;
    check(madvise(middle, 1 << 20, MADV_DONTNEED) == 0, "madvise");
    for (i = 0; i < 1 << 20; i += 4096)
        check(middle[i] == 0, "what was given up");
    check(mprotect(middle, 8192, PROT_READ) == 0 && mprotect(middle, 8192, PROT_READ | PROT_WRITE) == 0, "mprotect");
    memset(middle, 1, 1 << 20);
    /* Nobody looks there while all else comes and goes. */
    check(mprotect(middle, 1 << 20, PROT_NONE) == 0, "mprotect");
    for (int round = 0; round < 3; round++)
        for (i = 0; i < OTHER; i += 512)
            check(other[i] == mix(i) + 10 + 1, "a word of the library");
    for (i = 0; (char *)&words[i + 1] <= middle; i++)
        check(words[i] == mix(i) + 11, "a word before what is closed");
    check(mprotect(middle, 1 << 20, PROT_READ | PROT_WRITE) == 0, "mprotect back");
    for (i = 0; i < 1 << 20; i++)
        check(middle[i] == 1, "what was closed");
    right();
    return 0;
}
#endif
