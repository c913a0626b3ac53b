/* Ranks on several hosts that write one file, and tell each other of it. What they say is right, or where it is not. */
#define _GNU_SOURCE
#include "libi.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CHECK(what) do { if (!(what)) { printf("rank %d, line %d: %s: %s\n", rank, __LINE__, #what, strerror(errno)); exit(1); } } while (0)

static int rank, size;

static void barrier(void) { CHECK(LIBI_barrier() == LIBI_OK); }

/* A file that rank 0 makes. */
static int shared(const char *path, int flags) {
    int fd = rank == 0 ? open(path, O_CREAT | O_TRUNC | flags, 0644) : -1;
    barrier();
    if (rank > 0) fd = open(path, flags);
    CHECK(fd >= 0);
    return fd;
}

#define PAGE 4096

/* What other hosts wrote is asked of the file system, and not of this host's cache. Pages in which others of this host write meanwhile stay there: what
 * the kernel is about to write would be missing in what it reads anew. */
static void look(int fd, void *to, size_t len, off_t at) {
    off_t from = at / PAGE * PAGE;
    CHECK(posix_fadvise(fd, from, (at + len - from + PAGE - 1) / PAGE * PAGE, POSIX_FADV_DONTNEED) == 0);
    memset(to, 0, len);
    ssize_t got = pread(fd, to, len, at);
    CHECK(got >= 0);
}

struct record { uint64_t number, rank, both; };
#define BLOCK 32

static off_t place(long n, int of) { return ((n / BLOCK * size + of) * BLOCK + n % BLOCK) * (off_t)sizeof(struct record); }

/* Blocks of records of all ranks, interleaved. */
static void interleaved(const char *path, long count) {
    int fd = shared(path, O_RDWR);
    for (long n = 0; n < count; n++) {
        struct record record = { n, rank, n ^ rank << 20 };
        CHECK(pwrite(fd, &record, sizeof record, place(n, rank)) == sizeof record);
    }
    CHECK(close(fd) == 0);
    barrier();
    CHECK((fd = open(path, O_RDONLY)) >= 0);
    size_t len = place((count + BLOCK - 1) / BLOCK * BLOCK, 0);
    char *all = malloc(len);
    look(fd, all, len, 0);
    for (int of = 0; of < size; of++)
        for (long n = 0; n < count; n++) {
            struct record *record = (struct record *)(all + place(n, of));
            CHECK(record->number == (uint64_t)n && record->rank == (uint64_t)of && record->both == (uint64_t)(n ^ of << 20));
        }
    close(fd);
}

static int line(char *to, long n) {
    int pad = n % 100 == 99 ? 3000 : (int)(n * 37 % 70);
    return sprintf(to, "%d %ld %0*d\n", rank, n, pad + 1, 0);
}

/* Lines of all ranks at the same time, then in turn. */
static void appending(const char *path, long count) {
    enum { TURNS = 10 };
    char text[4096];
    int fd = shared(path, O_WRONLY | O_APPEND);
    for (long n = 0; n < count; n++) {
        int len = line(text, n);
        CHECK(write(fd, text, len) == len);
    }
    barrier();
    for (long n = count; n < count + TURNS; n++)
        for (int turn = 0; turn < size; turn++) {
            int len = line(text, n);
            if (turn == rank) CHECK(write(fd, text, len) == len);
            barrier();
        }
    CHECK(close(fd) == 0);
    barrier();
    if (rank > 0) return;
    FILE *all = fopen(path, "r");
    CHECK(all);
    long *next = calloc(size, sizeof *next), lines = 0, got_rank, got;
    for (int turn = 0; fgets(text, sizeof text, all); lines++) {
        int at;
        CHECK(sscanf(text, "%ld %ld %n", &got_rank, &got, &at) == 2 && got_rank < size);
        if (got != next[got_rank]) printf("line %ld: %ld of rank %ld instead of %ld\n", lines, got, got_rank, next[got_rank]);
        CHECK(got == next[got_rank]++);
        CHECK((int)strlen(text + at) == (got % 100 == 99 ? 3000 : (int)(got * 37 % 70)) + 2);
        if (got >= count) CHECK(got_rank == turn++ % size);
    }
    CHECK(lines == (count + TURNS) * size);
    fclose(all);
}

/* Connections around a ring by TCP: to the next rank and from the one before. */
static int to_next = -1, from_before = -1;

static void ring(char **names, int port) {
    struct addrinfo hints = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE }, *found;
    char service[16];
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    snprintf(service, sizeof service, "%d", port + rank);
    CHECK(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
    CHECK(getaddrinfo(NULL, service, &hints, &found) == 0 && bind(listener, found->ai_addr, found->ai_addrlen) == 0 && listen(listener, 4) == 0);
    barrier();
    snprintf(service, sizeof service, "%d", port + (rank + 1) % size);
    hints.ai_flags = 0;
    CHECK(getaddrinfo(names[(rank + 1) % size], service, &hints, &found) == 0);
    to_next = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(to_next, found->ai_addr, found->ai_addrlen) == 0);
    CHECK((from_before = accept(listener, NULL, NULL)) >= 0);
    close(listener);
}

/* Everybody's neighbours have got here: by TCP once around for each, or by the launcher. */
static void meet(void) {
    if (to_next < 0) return barrier();
    for (int round = 0; round < 2; round++) {
        char byte = 'x';
        if (rank == 0) CHECK(send(to_next, &byte, 1, 0) == 1);
        CHECK(recv(from_before, &byte, 1, MSG_WAITALL) == 1);
        if (rank > 0) CHECK(send(to_next, &byte, 1, 0) == 1);
    }
}

/* Cells in a row, of which each rank has some; those at its edges it writes, and reads its neighbours', in every iteration. */
static void solver(const char *path, long iterations) {
    enum { WIDTH = 16 };
    int fd = shared(path, O_RDWR), cells = size * WIDTH, first = rank * WIDTH, last = first + WIDTH - 1;
    /* Everybody knows the others' cells, too, to compare with. */
    uint64_t *now = calloc(cells + 2, 8), *next = calloc(cells + 2, 8), found;
    for (int n = 0; n < cells; n++) now[n + 1] = (uint64_t)n * n * 7919;
    for (long at = 0; at < iterations; at++) {
        off_t half = at % 2 * cells;
        int edges[] = { first, last }, neighbours[] = { first - 1, last + 1 };
        for (int n = 0; n < 2; n++) {
            CHECK(pwrite(fd, &now[edges[n] + 1], 8, (half + edges[n]) * PAGE) == 8);
            CHECK(pread(fd, &found, 8, (half + edges[n]) * PAGE) == 8 && found == now[edges[n] + 1]);
        }
        meet();
        for (int n = 0; n < 2; n++) {
            if (neighbours[n] < 0 || neighbours[n] >= cells) continue;
            look(fd, &found, 8, (half + neighbours[n]) * PAGE);
            if (found != now[neighbours[n] + 1]) printf("iteration %ld, cell %d: %lx instead of %lx\n", at, neighbours[n], found, now[neighbours[n] + 1]);
            CHECK(found == now[neighbours[n] + 1]);
        }
        for (int n = 1; n <= cells; n++) next[n] = now[n - 1] + 2 * now[n] + now[n + 1] + at;
        uint64_t *swap = now;
        now = next, next = swap;
    }
    meet();
    for (int n = first; n <= last; n++) CHECK(pwrite(fd, &now[n + 1], 8, (off_t)n * PAGE) == 8);
    CHECK(close(fd) == 0);
    barrier();
}

/* Rank 0 writes and tells rank 1, on its host, by memory alone; that tells the last rank by TCP, which looks. */
static void relay(const char *path, long count) {
    char name[64];
    snprintf(name, sizeof name, "/nodes-%s-%s", getenv("HPCRT_SESSION"), getenv("HPCRT_HOST"));
    int fd = shared(path, O_RDWR), memory = shm_open(name, O_RDWR | O_CREAT, 0600);
    CHECK(memory >= 0 && ftruncate(memory, 4096) == 0);
    _Atomic uint64_t *said = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    CHECK(said != MAP_FAILED);
    barrier();
    shm_unlink(name);
    for (uint64_t n = 1; n <= (uint64_t)count; n++) {
        uint64_t found = n;
        if (rank == 0) {
            CHECK(pwrite(fd, &n, 8, n * 8) == 8);
            *said = n;
            CHECK(recv(from_before, &found, 8, MSG_WAITALL) == 8);
            continue;
        }
        if (rank == 1) {
            while (*said != n) sched_yield();
        } else {
            CHECK(recv(from_before, &found, 8, MSG_WAITALL) == 8);
        }
        if (rank == size - 1) {
            look(fd, &found, 8, n * 8);
            if (found != n) printf("told of %lu, and %lu was there\n", n, found);
        }
        CHECK(found == n);
        CHECK(send(to_next, &n, 8, 0) == 8);
    }
    close(fd);
    barrier();
}

/* Numbers in a file of each rank's own, without end; rank 0 keeps how many everybody was told of. */
static void forever(const char *path, const char *told_path) {
    char own[4096];
    snprintf(own, sizeof own, "%s.%d", path, rank);
    int fd = open(own, O_WRONLY | O_CREAT | O_TRUNC, 0644), told = open(told_path, O_RDWR | O_CREAT, 0666);
    CHECK(fd >= 0 && (rank > 0 || (told >= 0 && ftruncate(told, 8) == 0)));
    for (uint64_t n = 0;; n++) {
        CHECK(write(fd, &n, 8) == 8);
        if (n % 500 != 499) continue;
        barrier();
        if (rank == 0) CHECK(pwrite(told, (uint64_t[]){ n + 1 }, 8, 0) == 8);
    }
}

int main(int argc, char **argv) {
    CHECK(LIBI_init(LIBI_VERSION, &argc, &argv) == LIBI_OK);
    LIBI_getMyRank(&rank);
    LIBI_getSize(&size);
    const char *mode = argv[1], *path = argv[2];
    long count = atol(argv[3]);
    if (strcmp(mode, "all") == 0) {
        char *names[] = { ".interleaved", ".appending", ".solver", ".tcp" }, file[4096];
        void (*works[])(const char *, long) = { interleaved, appending, solver, solver };
        for (int n = 0; n < 4; n++) {
            snprintf(file, sizeof file, "%s%s", path, names[n]);
            if (n == 3) ring(argv + 5, atoi(argv[4]));
            works[n](file, n < 2 ? count : count / 10);
        }
    }
    else if (strcmp(mode, "interleaved") == 0) interleaved(path, count);
    else if (strcmp(mode, "appending") == 0) appending(path, count);
    else if (strcmp(mode, "solver") == 0) solver(path, count);
    else if (strcmp(mode, "relay") == 0) {
        /* Names of all ranks' hosts. */
        ring(argv + 5, atoi(argv[4]));
        relay(path, count);
    }
    else if (strcmp(mode, "forever") == 0) forever(path, argv[3]);
    else if (strcmp(mode, "mapped") == 0) {
        /* Of a device that could be one by which other hosts are reached; this one cannot be mapped. */
        int device = open("/dev/null", O_RDWR);
        CHECK(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, device, 0) == MAP_FAILED);
        interleaved(path, count);
    }
    else return 2;
    LIBI_finalize();
    if (rank == 0) puts("right");
    return 0;
}
