/* What a program feels of memory that is away: argv[1] says what is measured, argv[2] on how many MB. Prints numbers only.
 *   blocks N   microseconds to read a block of N KiB at a random place: median, 99th percentile
 *   bare N [A] the same without a pager: a thread that answers faults with N KiB from a process behind a connection (over loopback, or of `give N` at
 *              address A), and nothing else
 *   triad      MB/s of STREAM's last kernel, best and median of six
 *   updates    microseconds of an update of a random word: median of those that took longer than what is here does, and mean of all
 *   columns    microseconds for a cell of 600 bytes of a row and one of 40 of another, through all rows, cell by cell, as NAS BT does in its third direction
 *   ranks      seconds to find their ranks ten times, as NAS IS does */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, ASK = 96 };
static size_t bytes;

static void need(int good, const char *what)
{
    if (!good) {
        perror(what);
        exit(1);
    }
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

static uint64_t random_word(void)
{
    static uint64_t x = 88172645463325252;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return x;
}

static int order(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print(double *times, size_t n)
{
    qsort(times, n, sizeof *times, order);
    printf("%.1f %.1f\n", times[n / 2], times[n * 99 / 100]);
}

/* Each block once. */
static void read_blocks(volatile char *base, size_t size, size_t most)
{
    size_t n = bytes / size, count = n < most ? n : most, i, at;
    size_t *places = malloc(n * sizeof *places);
    double *times = malloc(count * sizeof *times);
    for (i = 0; i < n; i++)
        places[i] = i;
    for (i = 0; i < count; i++) {
        size_t other = i + random_word() % (n - i), place = places[other];
        places[other] = places[i];
        double begun = now();
        for (at = 0; at < size; at += PAGE)
            (void)base[place * size + at];
        times[i] = now() - begun;
    }
    print(times + count / 4, count - count / 4);
}

static char *filled(void)
{
    uint64_t *a = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(a != MAP_FAILED, "mmap");
    for (size_t i = 0; i < bytes / 8; i++)
        a[i] = i * 0x9e3779b97f4a7c15;
    return (char *)a;
}

static int uffd, stream;
static size_t unit;
static char *staging;

static void receive(int fd, char *to, size_t len)
{
    while (len > 0) {
        ssize_t n = recv(fd, to, len, MSG_WAITALL);
        if (n <= 0)
            _exit(0);
        to += n, len -= n;
    }
}

static void *answer(void *argument)
{
    struct uffd_msg message;
    char ask[ASK] = {0};
    (void)argument;
    for (;;) {
        need(read(uffd, &message, sizeof message) == sizeof message, "read a fault");
        need(send(stream, ask, ASK, 0) == ASK, "send");
        receive(stream, staging, unit);
        struct uffdio_copy copy = {.dst = message.arg.pagefault.address / unit * unit, .src = (uintptr_t)staging, .len = unit};
        need(ioctl(uffd, UFFDIO_COPY, &copy) == 0, "UFFDIO_COPY");
    }
}

enum { PORT = 20100 };

static int door_at(struct sockaddr_in *at)
{
    int yes = 1, door = socket(AF_INET, SOCK_STREAM, 0);
    socklen_t len = sizeof *at;
    setsockopt(door, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    need(bind(door, (void *)at, len) == 0 && listen(door, 1) == 0 && getsockname(door, (void *)at, &len) == 0, "listen");
    return door;
}

/* To one who asks. */
static void give(int door)
{
    int yes = 1;
    char ask[ASK], *all = malloc(unit);
    memset(all, 7, unit);
    stream = accept(door, 0, 0);
    setsockopt(stream, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    for (;;) {
        receive(stream, ask, ASK);
        need(send(stream, all, unit, 0) == (ssize_t)unit, "send a unit");
    }
}

static void bare(const char *giver)
{
    int yes = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = giver ? inet_addr(giver) : htonl(INADDR_LOOPBACK)};
    staging = mmap(0, unit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (giver)
        at.sin_port = htons(PORT);
    else {
        int door = door_at(&at);
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            give(door);
        }
    }
    stream = socket(AF_INET, SOCK_STREAM, 0);
    need(connect(stream, (void *)&at, sizeof at) == 0, "connect");
    setsockopt(stream, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    uffd = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    struct uffdio_api api = {.api = UFFD_API};
    need(uffd >= 0 && ioctl(uffd, UFFDIO_API, &api) == 0, "userfaultfd");
    char *base = mmap(0, bytes + unit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    base = (char *)(((uintptr_t)base + unit - 1) / unit * unit);
    struct uffdio_register range = {.range = {(uintptr_t)base, bytes}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    need(ioctl(uffd, UFFDIO_REGISTER, &range) == 0, "register");
    pthread_t thread;
    need(pthread_create(&thread, 0, answer, 0) == 0, "pthread_create");
    read_blocks(base, unit, 4000);
}

static void triad(void)
{
    size_t n = bytes / 24, i;
    double *a = malloc(n * 8), *b = malloc(n * 8), *c = malloc(n * 8), rates[6];
    for (i = 0; i < n; i++)
        a[i] = 0, b[i] = i, c[i] = 2.0 * i;
    for (int r = 0; r < 6; r++) {
        double begun = now();
        for (i = 0; i < n; i++)
            a[i] = b[i] + (r + 3.0) * c[i];
        rates[r] = 24.0 * n / (now() - begun);
    }
    for (i = 0; i < n; i++)
        if (a[i] != b[i] + 8.0 * c[i])
            exit(3);
    qsort(rates, 6, sizeof *rates, order);
    printf("%.0f %.0f\n", rates[5], (rates[2] + rates[3]) / 2);
}

static void updates(void)
{
    enum { STEPS = 60000, HERE = 2 };
    uint64_t *a = (uint64_t *)filled();
    size_t n = bytes / 8, missed = 0, i;
    double *times = malloc(STEPS * sizeof *times), all = 0;
    for (i = 0; i < STEPS + STEPS / 4; i++) {
        double begun = now();
        a[random_word() % n] ^= i;
        double took = now() - begun;
        if (i >= STEPS / 4) {
            all += took;
            if (took > HERE)
                times[missed++] = took;
        }
    }
    qsort(times, missed, sizeof *times, order);
    printf("%.2f %.2f\n", missed > 0 ? times[missed / 2] : 0, all / STEPS);
}

/* Rows of 65 cells of 600 bytes, of which 62 of 65 rows in turn are used; and of 65 cells of 40 bytes. */
static void columns(void)
{
    enum { CELLS = 65, WORDS = 75, OTHER = 5 };
    size_t rows = bytes / (8 * CELLS * (WORDS + OTHER)), used = 0, row, i;
    double *large = calloc(rows * CELLS * WORDS, 8), *small = calloc(rows * CELLS * OTHER, 8), begun = 0;
    for (i = 0; i < rows * CELLS * WORDS; i++)
        large[i] = i;
    for (i = 0; i < rows * CELLS * OTHER; i++)
        small[i] = i;
    begun = now();
    for (size_t cell = 1; cell < CELLS; cell++)
        for (row = 0; row < rows; row++) {
            double *a = large + (row * CELLS + cell) * WORDS, *b = small + (row * CELLS + cell) * OTHER;
            if (row % CELLS < 1 || row % CELLS > 62)
                continue;
            for (i = 0; i < WORDS; i++)
                a[i] += (a - WORDS)[i];
            for (i = 0; i < OTHER; i++)
                b[i] += a[i];
            used++;
        }
    printf("%.2f\n", (now() - begun) / used);
}

/* Keys and a copy of them; each is counted ten times, of a sixteenth as many as there are. */
static void ranks(void)
{
    size_t n = bytes / 8, range = n / 16, i;
    uint32_t *keys = malloc(n * 4), *copy = malloc(n * 4), *counts = malloc((range + 1) * 4), total = 0;
    for (i = 0; i < n; i++)
        keys[i] = random_word() % range;
    double begun = now();
    for (int round = 0; round < 10; round++) {
        memset(counts, 0, (range + 1) * 4);
        for (i = 0; i < n; i++)
            counts[(copy[i] = keys[i]) + 1]++;
        for (i = 0; i < range; i++)
            counts[i + 1] += counts[i];
        total += counts[range] == n;
    }
    if (total != 10)
        exit(3);
    printf("%.2f\n", (now() - begun) / 1e6);
}

int main(int argc, char **argv)
{
    const char *what = argc > 2 ? argv[1] : "";
    size_t size = argc > 3 ? strtoul(argv[3], 0, 10) << 10 : PAGE;
    bytes = argc > 2 ? strtoul(argv[2], 0, 10) << 20 : 0;
    unit = size;
    if (!strcmp(what, "blocks"))
        read_blocks(filled(), size, 4000);
    else if (!strcmp(what, "bare"))
        bare(argc > 4 ? argv[4] : 0);
    else if (!strcmp(what, "give")) {
        struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(PORT)};
        give(door_at(&any));
    }
    else if (!strcmp(what, "triad"))
        triad();
    else if (!strcmp(what, "updates"))
        updates();
    else if (!strcmp(what, "columns"))
        columns();
    else if (!strcmp(what, "ranks"))
        ranks();
    else
        return 2;
    return 0;
}
