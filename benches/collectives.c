/* LIBI's micro-benchmark: 128-byte broadcast + barrier, scatter + gather. The least of several rounds, as rank 0 sees it, in
 * microseconds: `tree N FAN_OUT` by processes that are a tree of TCP connections on this machine, `member` by members of a job. */
#include "libi.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 128, ROUNDS = 60 };

static char *mine, *all;
static int size, fan_out, rank, up = -1, *down, children, *below;

static void die(const char *why) {
    perror(why);
    exit(1);
}

static void put(int fd, const char *bytes, size_t length) {
    for (ssize_t sent; length > 0; bytes += sent, length -= (size_t)sent)
        if ((sent = write(fd, bytes, length)) <= 0) die("write");
}

static void take(int fd, char *bytes, size_t length) {
    for (ssize_t got; length > 0; bytes += got, length -= (size_t)got)
        if ((got = read(fd, bytes, length)) <= 0) die("read");
}

static void tree_broadcast(char *bytes, size_t length) {
    if (up >= 0) take(up, bytes, length);
    for (int child = 0; child < children; child++) put(down[child], bytes, length);
}

static void tree_collect(char *bytes) {
    for (int child = 0; child < children; child++) take(down[child], bytes, 1);
    if (up >= 0) put(up, bytes, 1);
}

static void tree_scatter(void) {
    char *at = all + BYTES;
    if (up >= 0) take(up, all, (size_t)below[rank] * BYTES);
    memcpy(mine, all, BYTES);
    for (int child = 0; child < children; child++) {
        size_t length = (size_t)below[rank * fan_out + 1 + child] * BYTES;
        put(down[child], at, length);
        at += length;
    }
}

static void tree_gather(void) {
    char *at = all + BYTES;
    memcpy(all, mine, BYTES);
    for (int child = 0; child < children; child++) {
        size_t length = (size_t)below[rank * fan_out + 1 + child] * BYTES;
        take(down[child], at, length);
        at += length;
    }
    if (up >= 0) put(up, all, (size_t)below[rank] * BYTES);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static void measure(int member) {
    double least[2] = {1e12, 1e12};
    for (int round = 0; round < ROUNDS; round++) {
        double begin = now(), middle;
        char byte = 0;
        int failed = 0;
        if (member) {
            failed |= LIBI_broadcast(mine, BYTES) | LIBI_barrier();
            middle = now();
            failed |= LIBI_scatter(all, BYTES, mine) | LIBI_gather(mine, BYTES, all);
        } else {
            tree_broadcast(mine, BYTES);
            tree_broadcast(&byte, 1);
            tree_collect(&byte);
            middle = now();
            tree_scatter();
            tree_gather();
        }
        if (failed) exit(1);
        double end = now();
        if (middle - begin < least[0]) least[0] = middle - begin;
        if (end - middle < least[1]) least[1] = end - middle;
    }
    if (rank == 0) printf("%.0f %.0f\n", least[0], least[1]);
}

static void pair(int listener, struct sockaddr_in *address, int ends[2]) {
    int yes = 1;
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(ends[0], (struct sockaddr *)address, sizeof *address) < 0) die("connect");
    if ((ends[1] = accept(listener, NULL, NULL)) < 0) die("accept");
    for (int end = 0; end < 2; end++) setsockopt(ends[end], IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

static void tree(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), (*ends)[2] = calloc((size_t)size, sizeof *ends);
    below = calloc((size_t)size, sizeof *below);
    if (bind(listener, (struct sockaddr *)&address, length) < 0 || listen(listener, 16) < 0) die("listen");
    getsockname(listener, (struct sockaddr *)&address, &length);
    for (int node = size - 1; node >= 0; node--) {
        below[node] += 1;
        if (node > 0) below[(node - 1) / fan_out] += below[node];
        if (node > 0) pair(listener, &address, ends[node]);
    }
    for (int node = 1; node < size && rank == 0; node++) {
        pid_t child = fork();
        if (child < 0) die("fork");
        if (child == 0) rank = node;
    }
    up = rank > 0 ? ends[rank][0] : -1;
    down = calloc((size_t)fan_out, sizeof *down);
    for (int child = rank * fan_out + 1; child < size && child <= rank * fan_out + fan_out; child++) down[children++] = ends[child][1];
    measure(0);
    if (rank > 0) _exit(0);
    while (wait(NULL) > 0) {}
}

int main(int argc, char **argv) {
    mine = calloc(1, BYTES);
    if (argc == 4) {
        size = atoi(argv[2]);
        fan_out = atoi(argv[3]);
        all = calloc((size_t)size, BYTES);
        tree();
        return 0;
    }
    if (LIBI_init(LIBI_VERSION, &argc, &argv) != LIBI_OK) return 1;
    LIBI_getMyRank(&rank);
    LIBI_getSize(&size);
    all = calloc((size_t)size, BYTES);
    measure(1);
    return 0;
}
