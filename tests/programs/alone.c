/* A statically linked program that looks at what it was given: argv[1] is its own path, argv[2] how many MB it has. What it is told by the kernel, its thread-local
 * storage, signals and what it starts are as ever while its memory is away. Prints "right" at the end, and the largest resident set in kB before that. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <elf.h>

#include "checked.h"

extern char **environ;
extern const Elf64_Ehdr __ehdr_start;
static _Thread_local uint64_t mine[4000];
static uint64_t *all;
static size_t n;
static volatile int taken;

static void check_all(uint64_t added, const char *what)
{
    size_t i;
    for (i = 0; i < n; i++)
        check(all[i] == mix(i) + added, what);
}

static void take(int signal)
{
    char byte;
    size_t k = mix(taken) % n;
    check(all[k] == mix(k) && signal == SIGUSR1, "a word in a handler");
    /* System calls within. */
    int fd = open("/dev/zero", O_RDONLY);
    check(fd >= 0 && read(fd, &byte, 1) == 1 && close(fd) == 0, "a call in a handler");
    taken++;
}

static void given(char **argv)
{
    char link[4096] = {0};
    check(readlink("/proc/self/exe", link, sizeof link - 1) > 0 && !strcmp(link, argv[1]), "/proc/self/exe");
    check(!strcmp((char *)getauxval(AT_EXECFN), argv[1]) && !strcmp(argv[0], argv[1]), "AT_EXECFN");
    check(getauxval(AT_BASE) == 0, "AT_BASE");
    check(getauxval(AT_PHDR) == (uintptr_t)&__ehdr_start + __ehdr_start.e_phoff, "AT_PHDR");
    check(getauxval(AT_PHNUM) == __ehdr_start.e_phnum, "AT_PHNUM");
    check(getenv("GIVEN") && !strcmp(getenv("GIVEN"), "yes"), "a variable");
}

static void signals(void)
{
    struct sigaction action = {.sa_handler = take}, old;
    struct timespec soon = {0, 1000000};
    sigset_t most, none, before;
    int i;
    sigfillset(&action.sa_mask);
    check(sigaction(SIGUSR1, &action, 0) == 0 && sigaction(SIGUSR1, 0, &old) == 0 && old.sa_handler == take, "sigaction");
    for (i = 0; i < 50; i++)
        raise(SIGUSR1);
    sigfillset(&most);
    sigemptyset(&none);
    check(sigprocmask(SIG_SETMASK, &most, &before) == 0, "sigprocmask");
    raise(SIGUSR1);
    check(taken == 50, "a signal that is blocked");
    sigfillset(&most);
    sigdelset(&most, SIGUSR1);
    check(sigsuspend(&most) == -1 && errno == EINTR && taken == 51, "sigsuspend");
    raise(SIGUSR1);
    check(ppoll(0, 0, &soon, &most) == -1 && errno == EINTR && taken == 52, "ppoll");
    raise(SIGUSR1);
    check(pselect(0, 0, 0, 0, &soon, &most) == -1 && errno == EINTR && taken == 53, "pselect");
    check(sigprocmask(SIG_SETMASK, &before, 0) == 0, "sigprocmask back");
    /* On a stack of its own. */
    stack_t stack = {.ss_sp = mmap(0, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), .ss_size = 65536};
    action.sa_flags = SA_ONSTACK;
    check(sigaltstack(&stack, 0) == 0 && sigaction(SIGUSR1, &action, 0) == 0, "sigaltstack");
    raise(SIGUSR1);
    check(taken == 54, "a signal on its stack");
    check(signal(SIGSYS, SIG_IGN) == SIG_DFL && signal(SIGSYS, SIG_DFL) == SIG_IGN, "SIGSYS");
}

static void *thread(void *argument)
{
    size_t i;
    for (i = 0; i < 4000; i++)
        check(mine[i] == 0, "a thread's own"), mine[i] = i + (uintptr_t)argument;
    sched_yield();
    check_all(0, "a word in a thread");
    for (i = 0; i < 4000; i++)
        check(mine[i] == i + (uintptr_t)argument, "a thread's own later");
    return (void *)mine[10];
}

static void ended_well(pid_t pid, const char *what)
{
    int status;
    check(waitpid(pid, &status, 0) == pid && status == 0, what);
}

/* Strings for what is started lie in memory that is away. */
static void starts(void)
{
    char *text = malloc(n * 8);
    size_t at = n * 4;
    char *words[] = {text + 100, text + at, text + 2 * at - 4096, 0};
    pid_t pid;
    memset(text, 1, n * 8);
    strcpy(words[0], "/bin/sh"), strcpy(words[1], "-c"), strcpy(words[2], "test \"$(echo $GIVEN | cat)\" = yes");
    check_all(0, "a word while others are away");
    check(posix_spawn(&pid, words[0], 0, 0, words, environ) == 0, "posix_spawn");
    ended_well(pid, "what posix_spawn started");
    check_all(0, "a word after posix_spawn");
    pid = vfork();
    if (pid == 0) {
        execve(words[0], words, environ);
        _exit(1);
    }
    check(pid > 0, "vfork");
    ended_well(pid, "what vfork started");
    pid = fork();
    if (pid == 0) {
        check_all(0, "a word of a child");
        size_t i;
        for (i = 0; i < n; i++)
            all[i]++;
        check_all(1, "a word that a child wrote");
        _exit(system("true"));
    }
    check(pid > 0, "fork");
    ended_well(pid, "a child");
    check_all(0, "a word after a fork");
    free(text);
}

int main(int argc, char **argv)
{
    pthread_t threads[4];
    size_t i;
    void *result;
    check(argc == 3, "the arguments");
    given(argv);
    n = atol(argv[2]) * 1000000 / 8;
    all = malloc(n * 8);
    for (i = 0; i < n; i++)
        all[i] = mix(i);
    for (i = 0; i < 4; i++)
        check(pthread_create(&threads[i], 0, thread, (void *)(i * 7)) == 0, "pthread_create");
    for (i = 0; i < 4; i++)
        check(pthread_join(threads[i], &result) == 0 && (size_t)result == 10 + i * 7, "pthread_join");
    signals();
    starts();
    for (i = 0; i < 4000; i++)
        check(mine[i] == 0, "what is this thread's alone");
    /* A list of buffers that are away. */
    int fd = open("/dev/zero", O_RDONLY);
    struct iovec parts[2] = {{all, 5000}, {all + n / 2, 5000}};
    check(readv(fd, parts, 2) == 10000 && all[0] == 0 && all[n / 2] == 0 && all[n / 2 + 1000] == mix(n / 2 + 1000), "readv");
    right();
    return 0;
}
