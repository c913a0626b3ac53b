/* What few programs do with their memory: argv[1] says what, argv[2] how many MB it has. Prints "right" at the end, and the largest resident set in kB before that. */
#define _GNU_SOURCE
#include <aio.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <poll.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>

#include "checked.h"

enum { PAGE = 4096, KIB = 1024, MIB = 1024 * 1024, READ_WRITE = PROT_READ | PROT_WRITE };

static size_t bytes;
static volatile int ended;

static char *map(size_t len, int protection, int flags)
{
    char *at = mmap(0, len, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    check(at != MAP_FAILED, "mmap");
    return at;
}

/* What the kernel says of this process; `name` with its colon. */
static long status_of(const char *name)
{
    char line[200];
    long value = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, name, strlen(name)))
            value = atol(line + strlen(name));
    fclose(f);
    return value;
}

static long resident(void)
{
    return status_of("VmRSS:");
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static pthread_barrier_t turn;
static char *given, *swept;
static volatile int delay;

static void touch(void)
{
    size_t at;
    for (at = 0; at < bytes; at += PAGE)
        swept[at]++;
}

static void *miss(void *unused)
{
    volatile int n;
    (void)unused;
    while (pthread_barrier_wait(&turn), !ended) {
        for (n = 0; n < delay; n++)
            ;
        (void)*(volatile char *)given;
        touch();
        pthread_barrier_wait(&turn);
    }
    return 0;
}

/* Much is given up at once, from the middle of a MiB on whose beginning another thread misses meanwhile. */
static void beside(void)
{
    enum { SPANS = 100000, ROUNDS = 30, HALF = MIB / 2 };
    pthread_t other;
    size_t at;
    int round, n;
    swept = map(bytes, READ_WRITE, 0);
    given = map((size_t)(SPANS + 1) * MIB, READ_WRITE, MAP_NORESERVE);
    touch();
    check(madvise(given, HALF, MADV_SEQUENTIAL) == 0 && madvise(given + HALF, HALF, MADV_RANDOM) == 0, "madvise");
    pthread_barrier_init(&turn, 0, 2);
    check(pthread_create(&other, 0, miss, 0) == 0, "pthread_create");
    for (round = 0; round < ROUNDS; round++) {
        memset(given, 1, HALF);
        for (n = 1; n < 500; n++)
            given[(size_t)n * MIB] = 1;
        touch();
        touch();
        memset(given + HALF, 0xab, HALF);
        delay = round % 10 * 100000;
        pthread_barrier_wait(&turn);
        check(madvise(given + HALF, (size_t)SPANS * MIB, MADV_DONTNEED) == 0, "madvise");
        pthread_barrier_wait(&turn);
        for (at = HALF; at < MIB; at++)
            check(given[at] == 0, "what was given up is zero, whoever misses what beside it");
    }
    ended = 1;
    pthread_barrier_wait(&turn);
    pthread_join(other, 0);
}

/* A page comes and is given up, over and over, while all that is there fits. */
static void churn(void)
{
    char *first = map(bytes, READ_WRITE, 0), *page;
    long before, round;
    memset(first, 1, MIB);
    page = first + 2 * MIB;
    *page = 1;
    before = resident();
    for (round = 0; round < 150000; round++) {
        check(madvise(page, PAGE, MADV_DONTNEED) == 0 && *page == 0, "what is given up is zero");
        *page = 1;
    }
    check(resident() < before + KIB / 2, "nothing is kept of what was given up");
}

static void fill(char *at, size_t len, uint64_t seed)
{
    for (size_t i = 0; i < len; i += PAGE)
        *(uint64_t *)(at + i) = mix(i + seed);
}

static void filled(const char *at, size_t len, uint64_t seed)
{
    for (size_t i = 0; i < len; i += PAGE)
        check(*(uint64_t *)(at + i) == mix(i + seed), "a word");
}

/* Most of it is away when it is given back, and as much comes in its place elsewhere. */
static void again(void)
{
    size_t more = bytes + bytes / 8;
    char *first = map(bytes, READ_WRITE, 0), *second;
    fill(first, bytes, 1);
    check(munmap(first, bytes) == 0, "munmap");
    second = map(more, READ_WRITE, 0);
    fill(second, more, 2);
    filled(second, more, 2);
}

static void zero(const char *at, size_t len)
{
    for (size_t i = 0; i < len; i++)
        check(at[i] == 0, "a byte that is new");
}

/* Memory that was locked, as libraries do and as a call does of which libc knows nothing; before much is asked for, and then. */
static void locked(void)
{
    char *large = 0, *at;
    for (int round = 0; round < 2; round++) {
        for (int how = 0; how < 3; how++) {
            at = map(MIB, READ_WRITE, 0);
            zero(at, MIB);
            memset(at, 7, MIB);
            check((how == 2 ? syscall(SYS_mlock, at, MIB) : how ? mlock2(at, MIB, MLOCK_ONFAULT) : mlock(at, MIB)) == 0, "mlock");
            check(madvise(at, MIB / 2, MADV_DONTNEED) == 0, "madvise");
            zero(at, MIB / 2);
            check(at[MIB / 2] == 7, "what was not given up");
            memset(at, 7, MIB);
            check(munmap(at, MIB) == 0, "munmap");
        }
        if (!large)
            fill(large = map(bytes, READ_WRITE, 0), bytes, 3);
    }
    check(mlockall(MCL_CURRENT | MCL_FUTURE) == 0, "mlockall");
    filled(large, bytes, 3);
}

/* All of it is the break's. */
static void heap(void)
{
    char *at;
    mallopt(M_MMAP_MAX, 0);
    at = malloc(bytes);
    fill(at, bytes - PAGE, 4);
    filled(at, bytes - PAGE, 4);
    free(at);
}

static char array[3 * MIB] __attribute__((aligned(4096)));

/* Mappings that cannot become longer where they are, are where the program wants them, or are to be something else for a child. */
static void parts(void)
{
    char *at = map(MIB, READ_WRITE, 0), *to, *low;
    fill(at, MIB, 5);
    to = mremap(at, 256 * KIB, 768 * KIB, MREMAP_MAYMOVE);
    check(to != MAP_FAILED && to != at, "mremap of what others follow");
    memset(to, 9, 768 * KIB);
    for (size_t i = 256 * KIB; i < MIB; i += PAGE)
        check(*(uint64_t *)(at + i) == mix(i + 5), "what lies behind it");
    at = map(8 * MIB, PROT_NONE, 0);
    check(mprotect(at, 64 * KIB, READ_WRITE) == 0, "mprotect");
    to = mremap(at, 64 * KIB, 128 * KIB, MREMAP_MAYMOVE);
    check(to != MAP_FAILED, "mremap of what is reserved");
    memset(to, 9, 128 * KIB);
    low = map(MIB, READ_WRITE, MAP_32BIT);
    check((uintptr_t)low < 1UL << 32, "an address of 32 bits");
    at = map(MIB, READ_WRITE, 0);
    check(madvise(at, MIB, MADV_WIPEONFORK) != 0, "what cannot be done is not promised");
    fill(at, MIB, 24);
    check(mremap(at, MIB, MIB, MREMAP_MAYMOVE | MREMAP_DONTUNMAP) == MAP_FAILED && errno == EINVAL, "mremap of a copy");
    to = mmap(0, MIB, READ_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    check(to != MAP_FAILED, "mmap of what is shared");
    check(mremap(to, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED && errno == EINVAL, "mremap into what is captured");
    check(mremap(to, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, at - PAGE) == MAP_FAILED && errno == EINVAL, "mremap over its beginning");
    check(mremap(to, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, array) == MAP_FAILED && errno == EINVAL, "mremap over an array");
    filled(at, MIB, 24);
    at = map(64 * MIB, PROT_NONE, 0);
    check(mmap(at + MIB, 64 * KIB, READ_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at + MIB, "what is shared over it");
    at[MIB] = 1;
    check(mremap(at + MIB, 64 * KIB, 128 * KIB, MREMAP_MAYMOVE) == MAP_FAILED && errno == EINVAL && at[MIB] == 1, "mremap of that");
    fill(at = map(bytes, READ_WRITE, 0), bytes, 6);
    filled(at, bytes, 6);
}

/* What it has fits with the arrays, even when it has become longer, but not beside what it was. */
static void moved(void)
{
    char *at = map(14 * MIB, READ_WRITE, 0);
    fill(at, 14 * MIB, 25);
    at = mremap(at, 14 * MIB, 15 * MIB, MREMAP_MAYMOVE);
    check(at != MAP_FAILED, "mremap");
    filled(at, 14 * MIB, 25);
    zero(at + 14 * MIB, MIB);
}

/* As V8 has its code: a file over a part of what is reserved, and of an array, before anything is borrowed, with memory on both sides of it that can go. */
static void over(void)
{
    enum { BEFORE = 256 * KIB, BEHIND = BEFORE + 2 * PAGE };
    int file = open("/proc/self/exe", O_RDONLY), status, child = 1;
    char *both[] = {map(8 * MIB, PROT_NONE, 0), array}, *all;
    check(mprotect(both[0], 3 * MIB, READ_WRITE) == 0, "mprotect");
    for (int nth = 0; nth < 2; nth++) {
        char *at = both[nth];
        fill(at, 3 * MIB, 11);
        check(mmap(at + BEFORE, BEHIND - BEFORE, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0) == at + BEFORE, "a file over it");
    }
    check(munmap(array + MIB, 2 * PAGE) == 0, "munmap of a part of an array");
    fill(all = map(bytes, READ_WRITE, 0), bytes, 12);
    for (size_t round = 0; round < 2; round++) {
        for (int nth = 0; nth < 2; nth++) {
            char *at = both[nth];
            check(!memcmp(at + BEFORE, "\177ELF", 4), "the file");
            filled(at, BEFORE, 11);
            for (size_t i = BEHIND; i < 3 * MIB; i += PAGE)
                if (at != array || i / PAGE < MIB / PAGE || i / PAGE >= MIB / PAGE + 2)
                    check(*(uint64_t *)(at + i) == mix(i + 11), "what lies behind the file");
        }
        filled(all, bytes, 12);
        if (round == 0)
            child = fork();
    }
    if (child == 0)
        _exit(0);
    check(child > 0 && waitpid(child, &status, 0) == child && status == 0, "a child");
    check(munmap(both[0], 8 * MIB) == 0, "munmap");
}

/* As Java's ZGC: reserves where its pointers can be, and gives back what lies elsewhere. */
static void wishes(void)
{
    enum { TRIES = 1000 };
    char *at, *wished, *all;
    size_t nth;
    for (nth = 0; nth < TRIES; nth++) {
        wished = (char *)(4UL << 40) + nth * 64 * MIB;
        at = mmap(wished, 64 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        check(at != MAP_FAILED, "a wish");
        if (at == wished)
            break;
        check(munmap(at, 64 * MIB) == 0, "munmap");
    }
    check(nth == 64, "a wish comes true when the program has shown that it matters");
    map(MIB, PROT_NONE, 0);
    wished += 64 * MIB;
    check(mmap(wished, 64 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == wished, "another wish");
    check(mprotect(at, MIB, READ_WRITE) == 0, "mprotect");
    fill(at, MIB, 13);
    fill(all = map(bytes, READ_WRITE, 0), bytes, 14);
    filled(at, MIB, 13);
    filled(all, bytes, 14);
}

/* As Java with a large heap: more is reserved at once than is ever used. */
static void vast(void)
{
    char *at = map(17UL << 30, PROT_NONE, 0);
    check(mprotect(at, bytes, READ_WRITE) == 0, "mprotect");
    fill(at, bytes, 15);
    filled(at, bytes, 15);
    check(munmap(at, 17UL << 30) == 0, "munmap");
}

static void *sweep(void *argument)
{
    size_t len = bytes, round;
    char *at = map(len, READ_WRITE, 0);
    (void)argument;
    fill(at, len, 7);
    for (round = 0; !ended; round++)
        filled(at, len, 7);
    return 0;
}

static sig_atomic_t seen;

/* Whoever closed it opens it again. */
static void closed(int signal)
{
    (void)signal;
    seen++;
}

static char *house;
enum { HOUSE = 4 * MIB };

static void *reader(void *argument)
{
    uint64_t x = (uintptr_t)argument;
    while (!ended) {
        size_t i = (x = mix(x)) % (HOUSE / PAGE) * PAGE;
        check(*(volatile uint64_t *)(house + i) == mix(i + 8), "a word behind a door");
    }
    return 0;
}

/* Memory is made unreachable and reachable again while others look at it, and something else wants its place. */
static void doors(void)
{
    struct sigaction action = {.sa_handler = closed};
    pthread_t threads[3];
    double begun;
    sigaction(SIGSEGV, &action, 0);
    fill(house = map(HOUSE, READ_WRITE, 0), HOUSE, 8);
    pthread_create(&threads[0], 0, sweep, 0);
    pthread_create(&threads[1], 0, reader, (void *)1);
    pthread_create(&threads[2], 0, reader, (void *)2);
    for (begun = now(); now() < begun + 1;)
        for (size_t i = 0; i < HOUSE; i += 64 * KIB) {
            check(mprotect(house + i, 64 * KIB, PROT_NONE) == 0, "mprotect");
            check(mprotect(house + i, 64 * KIB, READ_WRITE) == 0, "mprotect back");
        }
    ended = 1;
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], 0);
    filled(house, HOUSE, 8);
}

/* Lists of buffers that somebody else's memory pushes out all the time. */
static void vectors(void)
{
    enum { PARTS = 8, PART = 96 * KIB };
    char name[] = "/tmp/hpcrt-test.XXXXXX", *all;
    int fd = mkstemp(name);
    pthread_t thread;
    struct iovec list[PARTS];
    double begun;
    unlink(name);
    fill(all = map(2 * PARTS * PART, READ_WRITE, 0), 2 * PARTS * PART, 9);
    for (int i = 0; i < PARTS; i++)
        list[i] = (struct iovec){all + 2 * i * PART, PART};
    check(pwritev(fd, list, PARTS, 0) == PARTS * PART, "pwritev");
    pthread_create(&thread, 0, sweep, 0);
    for (begun = now(); now() < begun + 1;) {
        check(pwritev(fd, list, PARTS, 0) == PARTS * PART, "pwritev of all");
        check(preadv(fd, list, PARTS, 0) == PARTS * PART, "preadv of all");
    }
    ended = 1;
    pthread_join(thread, 0);
    filled(all, 2 * PARTS * PART, 9);
}

static volatile int handled;

static void handler(int signal)
{
    /* In which everything is blocked. */
    char *text = swept;
    int null = open("/dev/null", O_WRONLY);
    handled = signal;
    check(write(null, text, PAGE) == PAGE && close(null) == 0, "a call in a handler");
}

static void *bound(void *count)
{
    ++*(int *)count;
    return 0;
}

/* The signal by which system calls are stopped is the program's, too; and so are calls that libc makes with all signals blocked. */
static void signals(void)
{
    struct sigaction action = { .sa_handler = handler, .sa_flags = SA_RESTART }, old;
    pthread_attr_t attributes;
    cpu_set_t set;
    pthread_t thread;
    int count = 0;
    sigfillset(&action.sa_mask);
    fill(swept = map(bytes, READ_WRITE, 0), bytes, 11);
    check(sigaction(SIGUSR1, &action, &old) == 0 && old.sa_handler == SIG_DFL, "sigaction");
    check(sigaction(SIGUSR1, 0, &old) == 0 && old.sa_handler == handler && old.sa_flags & SA_RESTART, "what the action is");
    check(sigismember(&old.sa_mask, SIGTERM) == 1 && sigaction(32, &action, 0) < 0 && sigaction(99, &action, 0) < 0, "its set");
    check(raise(SIGUSR1) == 0 && handled == SIGUSR1, "a handler");
    check(signal(SIGSYS, SIG_IGN) == SIG_DFL && raise(SIGSYS) == 0 && signal(SIGSYS, handler) == SIG_IGN, "SIGSYS ignored");
    check(raise(SIGSYS) == 0 && handled == SIGSYS && signal(SIGSYS, SIG_DFL) == handler, "SIGSYS handled");
    check(raise(SIGUSR1) == 0, "a call afterwards");
    sigset_t *was = (sigset_t *)swept;
    memset(&action.sa_mask, 0xff, sizeof action.sa_mask);
    filled(swept, bytes, 11);
    check(pthread_sigmask(SIG_SETMASK, &action.sa_mask, was) == 0 && !sigismember(was, SIGTERM), "a set that is away");
    *(uint64_t *)swept = mix(11);
    filled(swept, bytes, 11);
    check(sigprocmask(SIG_SETMASK, 0, was) == 0 && sigismember(was, SIGTERM), "another");
    check(!(*(uint64_t *)was >> 31 & 3), "what libc needs is never blocked");
    check(sigemptyset(&action.sa_mask) == 0 && sigprocmask(SIG_SETMASK, &action.sa_mask, 0) == 0, "sigprocmask");
    *(uint64_t *)swept = mix(11);
    check(sched_getaffinity(0, sizeof set, &set) == 0 && pthread_attr_init(&attributes) == 0, "sched_getaffinity");
    check(pthread_attr_setaffinity_np(&attributes, sizeof set, &set) == 0, "pthread_attr_setaffinity_np");
    check(pthread_create(&thread, &attributes, bound, &count) == 0 && pthread_join(thread, 0) == 0 && count == 1, "a bound thread");
    filled(swept, bytes, 11);
}

static void *drain(void *end)
{
    static char some[64 * KIB];
    size_t all = 0;
    ssize_t got;
    while ((got = read(*(int *)end, some, sizeof some)) > 0)
        all += got;
    return (void *)all;
}

static void finished(struct aiocb *one, ssize_t len)
{
    const struct aiocb *list[] = {one};
    while (aio_error(one) == EINPROGRESS)
        check(aio_suspend(list, 1, 0) == 0 || errno == EINTR, "aio_suspend");
    check(aio_return(one) == len, "what aio(7) did");
}

/* libc's threads for that have all signals blocked. */
static void queued(void)
{
    enum { MUCH = 2 * MIB };
    char name[] = "/tmp/hpcrt-test.XXXXXX", *from = malloc(MUCH), *to = malloc(MUCH);
    struct aiocb one = {.aio_fildes = mkstemp(name), .aio_nbytes = MUCH, .aio_buf = from}, two = one, *both[] = {&one, &two};
    sigset_t all;
    check(one.aio_fildes >= 0 && unlink(name) == 0 && sigfillset(&all) == 0 && sigismember(&all, SIGTERM) == 1, "mkstemp");
    fill(from, MUCH, 21);
    fill(swept = map(bytes, READ_WRITE, 0), bytes, 22);
    for (int round = 0; round < 3; round++) {
        check(aio_write(&one) == 0, "aio_write");
        finished(&one, MUCH);
        filled(swept, bytes, 22);
        two.aio_buf = to;
        check(aio_read(&two) == 0, "aio_read");
        finished(&two, MUCH);
        filled(to, MUCH, 21);
        memset(to, 0, MUCH);
        one.aio_lio_opcode = LIO_WRITE;
        two.aio_lio_opcode = LIO_NOP;
        check(lio_listio(LIO_WAIT, both, 2, 0) == 0 && aio_return(&one) == MUCH, "lio_listio");
        filled(swept, bytes, 22);
    }
}

/* What blocks is whole. */
static void whole(void)
{
    enum { MUCH = 8 * MIB };
    char *at = map(bytes, READ_WRITE, 0);
    int ends[2];
    pthread_t thread;
    void *got;
    fill(at, bytes, 12);
    check(pipe(ends) == 0 && pthread_create(&thread, 0, drain, ends) == 0, "pipe");
    check(write(ends[1], at, MUCH) == MUCH && close(ends[1]) == 0, "write");
    check(pthread_join(thread, &got) == 0 && (size_t)got == MUCH, "what was written");
    filled(at, bytes, 12);
}

enum { WAITERS = 16, LARGE = 4 * MIB };
static int waited[WAITERS][2];
static char *rooms[WAITERS];

static void *wait_in_read(void *argument)
{
    long nth = (long)argument;
    check(read(waited[nth][0], rooms[nth], LARGE) == 5 && !memcmp(rooms[nth], "hello", 5), "a read that waited");
    return 0;
}

static volatile int left;

static void leave(char *unused)
{
    (void)unused;
    left++;
}

static void *wait_in_readv(void *argument)
{
    char *room = rooms[(long)argument], inside __attribute__((cleanup(leave)));
    struct iovec list[2] = {{room, 2}, {room + 9 * PAGE, LARGE - 9 * PAGE}};
    check(readv(waited[(long)argument][0], list, 2) == 5 && !memcmp(room, "he", 2) && !memcmp(room + 9 * PAGE, "llo", 3), "a readv that waited");
    return 0;
}

static void *wait_in_recvmsg(void *argument)
{
    char *room = rooms[(long)argument];
    struct iovec part = {room + PAGE, LARGE - PAGE};
    struct msghdr *message = (struct msghdr *)room;
    *message = (struct msghdr){.msg_iov = &part, .msg_iovlen = 1};
    check(recvmsg(waited[(long)argument][0], message, 0) == 5 && !memcmp(room + PAGE, "hello", 5), "a recvmsg that waited");
    return 0;
}

static void *wait_in_epoll(void *argument)
{
    struct epoll_event *all = (struct epoll_event *)rooms[(long)argument], one = {.events = EPOLLIN, .data.u64 = 77};
    int set = epoll_create1(0);
    check(epoll_ctl(set, EPOLL_CTL_ADD, waited[(long)argument][0], &one) == 0, "epoll_ctl");
    check(epoll_wait(set, all, 10000, -1) == 1 && all->data.u64 == 77 && close(set) == 0, "an epoll_wait that waited");
    return 0;
}

static void *wait_in_poll(void *argument)
{
    struct pollfd *all = (struct pollfd *)rooms[(long)argument];
    for (int i = 0; i < 1000; i++)
        all[i].fd = i == 999 ? waited[(long)argument][0] : -1;
    all[999].events = POLLIN;
    check(poll(all, 1000, -1) == 1 && all[999].revents == POLLIN, "a poll that waited");
    return 0;
}

static pthread_t start_waiter(long nth, void *(*how)(void *))
{
    pthread_t thread;
    rooms[nth] = map(LARGE, READ_WRITE, 0);
    check(socketpair(AF_UNIX, SOCK_STREAM, 0, waited[nth]) == 0 && pthread_create(&thread, 0, how, (void *)nth) == 0, "a thread that waits");
    return thread;
}

static void wake_waiter(long nth, pthread_t thread)
{
    check(write(waited[nth][1], "hello", 5) == 5 && pthread_join(thread, 0) == 0, "a thread that waited");
}

/* Threads wait in the kernel when much is asked for, and when all that they wait with would be away. */
static void early(void)
{
    void *(*ways[])(void *) = {wait_in_read, wait_in_readv, wait_in_recvmsg, wait_in_epoll, wait_in_poll};
    enum { WAYS = sizeof ways / sizeof *ways };
    pthread_t threads[WAYS];
    for (long nth = 0; nth < WAYS; nth++)
        threads[nth] = start_waiter(nth, ways[nth]);
    usleep(200000);
    fill(swept = map(bytes, READ_WRITE, 0), bytes, 13);
    filled(swept, bytes, 13);
    filled(swept, bytes, 13);
    for (long nth = 0; nth < WAYS; nth++)
        wake_waiter(nth, threads[nth]);
    for (long nth = 0; nth < WAYS; nth++)
        threads[nth] = start_waiter(nth, ways[nth]);
    usleep(50000);
    filled(swept, bytes, 13);
    filled(swept, bytes, 13);
    for (long nth = 0; nth < WAYS; nth++)
        wake_waiter(nth, threads[nth]);
}

/* Together they wait with three times as much as may be here. */
static void crowd(void)
{
    pthread_t threads[WAITERS];
    fill(swept = map(bytes, READ_WRITE, 0), bytes, 14);
    for (int round = 0; round < 2; round++) {
        for (long nth = 0; nth < WAITERS; nth++)
            threads[nth] = start_waiter(nth, wait_in_read);
        usleep(50000);
        filled(swept, bytes, 14);
        for (long nth = 0; nth < WAITERS; nth++)
            wake_waiter(nth, threads[nth]);
    }
}

static sigjmp_buf out;

static void jump(int signal)
{
    siglongjmp(out, signal);
}

/* A call is left by a jump out of a handler, and by the end of its thread, over and over. */
static void jumped(void)
{
    struct itimerval soon = {.it_value.tv_usec = 300};
    pthread_t thread;
    void *end;
    fill(swept = map(bytes, READ_WRITE, 0), bytes, 15);
    signal(SIGALRM, jump);
    check(socketpair(AF_UNIX, SOCK_STREAM, 0, waited[0]) == 0, "socketpair");
    for (volatile int round = 0; round < 300; round++)
        if (!sigsetjmp(out, 1)) {
            setitimer(ITIMER_REAL, &soon, 0);
            check(read(waited[0][0], swept + round % (bytes / LARGE) * LARGE, LARGE) < 0, "a read that is left");
        }
    filled(swept, bytes, 15);
    for (int round = 0; round < 40; round++) {
        thread = start_waiter(1, wait_in_read);
        usleep(1000);
        check(pthread_cancel(thread) == 0 && pthread_join(thread, &end) == 0 && end == PTHREAD_CANCELED, "a thread that is cancelled");
        check(munmap(rooms[1], LARGE) == 0 && close(waited[1][0]) == 0 && close(waited[1][1]) == 0, "what it had");
    }
    filled(swept, bytes, 15);
}

static void *wait_in_recvmmsg(void *argument)
{
    char *room = rooms[(long)argument];
    struct iovec part = {room, LARGE};
    struct mmsghdr message = {.msg_hdr = {.msg_iov = &part, .msg_iovlen = 1}};
    recvmmsg(waited[(long)argument][0], &message, 1, 0, 0);
    return 0;
}

static void *wait_in_sendmsg(void *argument)
{
    struct iovec part = {rooms[(long)argument], LARGE};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    sendmsg(waited[(long)argument][0], &message, 0);
    return 0;
}

static void *wait_in_pipe(void *argument)
{
    struct iovec part = {rooms[(long)argument], LARGE};
    int ends[2];
    check(pipe(ends) == 0, "pipe");
    vmsplice(ends[0], &part, 1, 0);
    return 0;
}

/* A call made as glibc makes those in which a thread may be cancelled, from 2.41 on. */
long made_by_place(long number, long first, char *at, long len);
__asm__("made_by_place: sub $24, %rsp\n mov %rdi, %rax\n mov %rsi, %rdi\n mov %rdx, %rsi\n mov %rcx, %rdx\n"
        "mov %r11, 8(%rsp)\n syscall\n add $24, %rsp\n ret");

static void *wait_by_place(void *argument)
{
    made_by_place(SYS_read, waited[(long)argument][0], rooms[(long)argument], LARGE);
    return 0;
}

static long filters(void)
{
    return status_of("Seccomp_filters:");
}

/* Threads that wait for ever in a call are cancelled, before much is asked for and then. Who unwinds finds what they have to clean up. */
static void cancelled(void)
{
    void *(*ways[])(void *) = {wait_in_read, wait_in_readv, wait_in_recvmsg, wait_in_recvmmsg, wait_in_sendmsg, wait_in_pipe, wait_by_place};
    enum { WAYS = sizeof ways / sizeof *ways };
    int dynamic = getauxval(AT_BASE) != 0;
    long before = filters();
    void *end;
    for (int round = 0; round < 2; round++) {
        for (int way = 0; way < WAYS; way++) {
            if (ways[way] == wait_by_place && (!dynamic || filters() == before))
                continue;
            for (int late = 0; late < 2; late++) {
                pthread_t thread = start_waiter(1, ways[way]);
                int last = left;
                usleep(late * 20000);
                check(pthread_cancel(thread) == 0 && pthread_join(thread, &end) == 0 && end == PTHREAD_CANCELED, "a thread that is cancelled");
                check(!dynamic || !late || ways[way] != wait_in_readv || left == last + 1, "what is cleaned up");
                check(munmap(rooms[1], LARGE) == 0 && close(waited[1][0]) == 0 && close(waited[1][1]) == 0, "what it had");
            }
        }
        if (round == 0)
            fill(swept = map(bytes, READ_WRITE, 0), bytes, 23);
        filled(swept, bytes, 23);
    }
}

/* Lists of many parts, and of messages, into memory that somebody else's pushes out all the time. */
static void messages(void)
{
    enum { PARTS = 600, PART = 8 * KIB, MANY = 20, WORDS = 512 };
    char name[] = "/tmp/hpcrt-test.XXXXXX", *from = map(2 * PARTS * PART, READ_WRITE, 0), *to = map(2 * PARTS * PART, READ_WRITE, 0);
    struct iovec list[PARTS], other[PARTS];
    struct mmsghdr sent[MANY] = {0}, got[MANY] = {0};
    struct { long type; uint64_t words[WORDS]; } *message = (void *)map(2 * MIB, READ_WRITE, 0), *answer = (void *)((char *)message + MIB);
    int fd = mkstemp(name), ends[2], queue = msgget(IPC_PRIVATE, 0600);
    pthread_t thread;
    double begun;
    unlink(name);
    for (int i = 0; i < PARTS; i++) {
        fill(from + 2 * i * PART, PART, i);
        list[i] = (struct iovec){from + 2 * i * PART, PART};
        other[i] = (struct iovec){to + 2 * i * PART, PART};
    }
    for (int i = 0; i < MANY; i++) {
        sent[i].msg_hdr = (struct msghdr){.msg_iov = list + 2 * i, .msg_iovlen = 2};
        got[i].msg_hdr = (struct msghdr){.msg_iov = other + 2 * i, .msg_iovlen = 2};
    }
    check(socketpair(AF_UNIX, SOCK_DGRAM, 0, ends) == 0 && pthread_create(&thread, 0, sweep, 0) == 0, "socketpair");
    for (begun = now(); now() < begun + 2;) {
        check(lseek(fd, 0, SEEK_SET) == 0 && writev(fd, list, PARTS) == PARTS * PART, "writev of many");
        check(preadv2(fd, other, PARTS, 0, 0) == PARTS * PART, "preadv2 of many");
        check(pwritev2(fd, other, PARTS, 0, 0) == PARTS * PART, "pwritev2 of many");
        check(lseek(fd, 0, SEEK_SET) == 0 && readv(fd, other, PARTS) == PARTS * PART, "readv of many");
        for (int i = 0; i < PARTS; i++)
            filled(to + 2 * i * PART, PART, i);
        memset(to, 0, 2 * MANY * 2 * PART);
        for (int i = 0; i < MANY;) {
            int some = sendmmsg(ends[0], sent + i, MANY - i < 8 ? MANY - i : 8, 0);
            check(some > 0, "sendmmsg");
            for (int end = i + some; i < end;) {
                some = recvmmsg(ends[1], got + i, end - i, 0, 0);
                check(some > 0 && got[i].msg_len == 2 * PART, "recvmmsg");
                i += some;
            }
        }
        for (int i = 0; i < 2 * MANY; i++)
            filled(to + 2 * i * PART, PART, i);
        message->type = 1;
        for (int i = 0; i < WORDS; i++)
            message->words[i] = mix(i);
        check(msgsnd(queue, message, sizeof message->words, 0) == 0, "msgsnd");
        memset(answer, 0, sizeof *answer);
        usleep(1000);
        check(msgrcv(queue, answer, sizeof answer->words, 0, 0) == sizeof answer->words && !memcmp(message, answer, sizeof *answer), "msgrcv");
    }
    ended = 1;
    pthread_join(thread, 0);
    check(msgctl(queue, IPC_RMID, 0) == 0, "msgctl");
}

/* What a pipe was given by reference, and what was asked to be sent so. */
static void spliced(void)
{
    enum { PAGES = 16, SOCKET_ZEROCOPY = 60 };
    char *from = map(MIB, READ_WRITE, 0), *to = map(MIB, READ_WRITE, 0);
    struct iovec part = {from, PAGES * PAGE};
    int ends[2], one = 1;
    ssize_t got;
    fill(swept = map(bytes, READ_WRITE, 0), bytes, 16);
    fill(from, PAGES * PAGE, 17);
    check(pipe(ends) == 0 && vmsplice(ends[1], &part, 1, SPLICE_F_NONBLOCK) == PAGES * PAGE, "vmsplice");
    check(vmsplice(ends[1], &part, 1, SPLICE_F_NONBLOCK) < 0 && errno == EAGAIN, "vmsplice into what is full");
    filled(swept, bytes, 16);
    fill(swept, bytes, 18);
    part.iov_base = to;
    check(vmsplice(ends[0], &part, 1, 0) == PAGES * PAGE, "vmsplice out of it");
    part = (struct iovec){from, MIB};
    got = vmsplice(ends[1], &part, 1, 0);
    check(got >= PAGE && got < MIB && read(ends[0], to + 512 * KIB, got) == got, "vmsplice of more than fits");
    filled(to, PAGES * PAGE, 17);
    filled(from, PAGES * PAGE, 17);
    check(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair");
    check(setsockopt(ends[0], SOL_SOCKET, SOCKET_ZEROCOPY, &one, sizeof one) < 0, "what is sent by reference");
    check(setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, to, sizeof(struct timeval)) == 0 || errno == EDOM, "setsockopt");
}

/* io_uring (linux/io_uring.h) with a buffer that it has pinned. */
static void pinned(void)
{
    enum { SETUP = 425, ENTER, REGISTER, RINGS = 0, ENTRIES = 0x10000000, READ_FIXED = 4, WAIT = 1 };
    uint32_t about[30] = {0};
    char name[] = "/tmp/hpcrt-test.XXXXXX", *room = map(MIB, READ_WRITE, 0), *ring, *entry;
    struct iovec part = {room, MIB};
    int fd = mkstemp(name), uring = syscall(SETUP, 4, about);
    unlink(name);
    check(uring >= 0 && syscall(REGISTER, uring, 0, &part, 1) == 0, "io_uring");
    ring = mmap(0, PAGE, READ_WRITE, MAP_SHARED, uring, RINGS);
    entry = mmap(0, PAGE, READ_WRITE, MAP_SHARED, uring, ENTRIES);
    check(ring != MAP_FAILED && entry != MAP_FAILED, "its rings");
    for (uint64_t word = 0; word < MIB / 8; word++)
        check(write(fd, &word, 8) == 8, "write");
    fill(swept = map(bytes, READ_WRITE, 0), bytes, 19);
    filled(swept, bytes, 19);
    *(uint8_t *)entry = READ_FIXED;
    *(int32_t *)(entry + 4) = fd;
    *(uint64_t *)(entry + 16) = (uintptr_t)room;
    *(uint32_t *)(entry + 24) = MIB;
    /* Of struct io_uring_params: where the tail is, and the list of entries. */
    *(uint32_t *)(ring + about[16]) = 0;
    *(volatile uint32_t *)(ring + about[11]) = 1;
    check(syscall(ENTER, uring, 1, 1, WAIT, 0, 0) == 1, "a read into it");
    for (uint64_t word = 0; word < MIB / 8; word++)
        check(((uint64_t *)room)[word] == word, "what was read");
    filled(swept, bytes, 19);
}

/* Address space is given back in pieces that do not lie together, over and over. */
static void scattered(void)
{
    enum { BLOCKS = 2000, BLOCK = 8 * MIB, ROUNDS = 100 };
    static char *blocks[BLOCKS];
    fill(swept = map(bytes, READ_WRITE, 0), bytes, 20);
    for (int round = 0; round < ROUNDS; round++)
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < BLOCKS; i++)
                if (!blocks[i])
                    *(int *)(blocks[i] = map(BLOCK, READ_WRITE, MAP_NORESERVE)) = i;
            for (int i = half; i < BLOCKS; i += 2) {
                check(*(int *)blocks[i] == i && munmap(blocks[i], BLOCK) == 0, "munmap");
                blocks[i] = 0;
            }
        }
    filled(swept, bytes, 20);
}

static pid_t server;

/* A fork for which the server, which is stopped meanwhile, has no connection fails, and nothing else does. */
static void alone(void)
{
    char *at = map(bytes, READ_WRITE, 0);
    int status;
    fill(at, bytes, 10);
    // Nothing is missed just before the server stops: what goes for it would not be answered.
    pid_t stopped = server;
    sleep(2);
    check(kill(stopped, SIGSTOP) == 0 && fork() < 0 && errno == EAGAIN, "a fork that gets no connections");
    check(kill(stopped, SIGCONT) == 0, "SIGCONT");
    filled(at, bytes, 10);
    pid_t child = fork();
    if (child == 0) {
        filled(at, bytes, 10);
        _exit(0);
    }
    check(child > 0 && waitpid(child, &status, 0) == child && status == 0, "the next fork");
}

int main(int argc, char **argv)
{
    struct { const char *name; void (*run)(void); } all[] = {{"churn", churn}, {"beside", beside}, {"again", again}, {"locked", locked}, {"heap", heap},
        {"parts", parts}, {"moved", moved}, {"over", over}, {"wishes", wishes}, {"vast", vast}, {"doors", doors}, {"vectors", vectors}, {"signals", signals}, {"whole", whole}, {"early", early},
        {"crowd", crowd}, {"queued", queued}, {"jumped", jumped}, {"cancelled", cancelled}, {"messages", messages}, {"spliced", spliced}, {"pinned", pinned}, {"scattered", scattered},
        {"alone", alone}};
    server = argc > 3 ? atoi(argv[3]) : 0;
    bytes = argc > 2 ? (size_t)atol(argv[2]) * 1000000 / PAGE * PAGE : 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (argc > 1 && !strcmp(argv[1], all[i].name)) {
            all[i].run();
            right();
            return 0;
        }
    return 2;
}
