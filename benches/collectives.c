/* LIBI's micro-benchmark: 128-byte broadcast + barrier, scatter + gather. The least of several rounds, as rank 0 sees it, in
 * microseconds: `tree N FAN_OUT` by processes that are a tree of TCP connections on this machine; `relays N HOSTS` by processes in hpcrt's
 * shape, one for each host between its members and one for all; `member` by members of a job. */
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

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
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

/* The same by way of relays: `up` leads to the host's, whose own leads to the one for all. Nobody but rank 0 waits for what he has given. */
static void relayed_round(double *middle) {
    char byte = 0;
    if (rank == 0) put(up, mine, BYTES);
    take(up, mine, BYTES);
    put(up, &byte, 1);
    take(up, &byte, 1);
    *middle = now();
    if (rank == 0) put(up, all, (size_t)size * BYTES);
    take(up, mine, BYTES);
    put(up, mine, BYTES);
    if (rank == 0) take(up, all, (size_t)size * BYTES);
}

/* One relay's part of a round. `each[child]` members are below each child; the first child leads to rank 0, if `master`. */
static void relay_round(const int *each, int total, int master) {
    size_t whole = (size_t)size * BYTES;
    char *at = all, byte;
    if (master) take(down[0], mine, BYTES);
    if (master && up >= 0) put(up, mine, BYTES);
    if (up >= 0) take(up, mine, BYTES);
    for (int child = 0; child < children; child++) put(down[child], mine, BYTES);
    for (int child = 0; child < children; child++) take(down[child], &byte, 1);
    if (up >= 0) put(up, &byte, 1), take(up, &byte, 1);
    for (int child = 0; child < children; child++) put(down[child], &byte, 1);
    if (master) take(down[0], all, whole);
    if (master && up >= 0) put(up, all, whole);
    if (up >= 0) take(up, all, (size_t)total * BYTES);
    for (int child = 0; child < children; at += each[child++] * BYTES) put(down[child], at, (size_t)each[child] * BYTES);
    at = all;
    for (int child = 0; child < children; at += each[child++] * BYTES) take(down[child], at, (size_t)each[child] * BYTES);
    if (up >= 0) put(up, all, (size_t)total * BYTES);
    if (master && up >= 0) take(up, all, whole);
    if (master) put(down[0], all, whole);
}

enum way { TREE, RELAYS, MEMBER };

static void measure(enum way way) {
    double least[2] = {1e12, 1e12};
    for (int round = 0; round < ROUNDS; round++) {
        double begin = now(), middle;
        char byte = 0;
        int failed = 0;
        if (way == MEMBER) {
            failed |= LIBI_broadcast(mine, BYTES) | LIBI_barrier();
            middle = now();
            failed |= LIBI_scatter(all, BYTES, mine) | LIBI_gather(mine, BYTES, all);
        } else if (way == RELAYS) {
            relayed_round(&middle);
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

static int open_listener(struct sockaddr_in *address) {
    socklen_t length = sizeof *address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    *address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener, (struct sockaddr *)address, length) < 0 || listen(listener, 16) < 0) die("listen");
    getsockname(listener, (struct sockaddr *)address, &length);
    return listener;
}

/* Becomes a relay, unless this is the caller's own process. */
static void relay(int above, int (*ends)[2], const int *each, int count, int master) {
    int total = 0;
    pid_t child = fork();
    if (child < 0) die("fork");
    if (child > 0) return;
    up = above;
    children = count;
    down = calloc((size_t)count, sizeof *down);
    for (int nth = 0; nth < count; nth++) down[nth] = ends[nth][1], total += each[nth];
    for (int round = 0; round < ROUNDS; round++) relay_round(each, total, master);
    _exit(0);
}

static void relays(int hosts) {
    struct sockaddr_in address;
    int listener = open_listener(&address);
    int (*hosts_ends)[2] = calloc((size_t)hosts, sizeof *hosts_ends), (*ends)[2] = calloc((size_t)size, sizeof *ends);
    int *each = calloc((size_t)hosts, sizeof *each), *one = calloc((size_t)size, sizeof *one);
    for (int host = 0; host < hosts; host++) pair(listener, &address, hosts_ends[host]);
    for (int member = 0; member < size; member++) pair(listener, &address, ends[member]), one[member] = 1;
    for (int host = 0, first = 0; host < hosts; first += each[host++]) {
        each[host] = size / hosts + (host < size % hosts);
        relay(hosts_ends[host][0], ends + first, one, each[host], host == 0);
    }
    relay(-1, hosts_ends, each, hosts, 1);
    for (int member = 1; member < size && rank == 0; member++) {
        pid_t child = fork();
        if (child < 0) die("fork");
        if (child == 0) rank = member;
    }
    up = ends[rank][0];
    measure(RELAYS);
    if (rank > 0) _exit(0);
    while (wait(NULL) > 0) {}
}

static void tree(void) {
    struct sockaddr_in address;
    int listener = open_listener(&address), (*ends)[2] = calloc((size_t)size, sizeof *ends);
    below = calloc((size_t)size, sizeof *below);
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
    measure(TREE);
    if (rank > 0) _exit(0);
    while (wait(NULL) > 0) {}
}

int main(int argc, char **argv) {
    mine = calloc(1, BYTES);
    if (argc == 4) {
        size = atoi(argv[2]);
        fan_out = atoi(argv[3]);
        all = calloc((size_t)size, BYTES);
        if (strcmp(argv[1], "relays") == 0) relays(fan_out);
        else tree();
        return 0;
    }
    if (LIBI_init(LIBI_VERSION, &argc, &argv) != LIBI_OK) return 1;
    LIBI_getMyRank(&rank);
    LIBI_getSize(&size);
    all = calloc((size_t)size, BYTES);
    measure(MEMBER);
    return 0;
}
