/* Members that call LIBI's operations. `rounds N`: many, of all sizes. `exit`, `kill`: rank 4 goes, and the others say what they are told.
 * `leave`: who has given its part ends before the master asks for it. `mixed`: some members of the same job are scripts. */
#include "libi.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int rank, size;

static void check(libi_rc_e rc, const char *what, int round) {
    if (rc == LIBI_OK) return;
    fprintf(stderr, "rank %d, round %d: %s: %d %s\n", rank, round, what, rc, LIBI_missing());
    exit(1);
}

static char byte(int round, int of, int at) { return (char)(round * 7 + of * 31 + at); }

static void expect(const char *bytes, int length, int round, int of) {
    for (int at = 0; at < length; at++)
        if (bytes[at] != byte(round, of, at)) {
            fprintf(stderr, "rank %d, round %d: wrong byte of %d at %d of %d\n", rank, round, of, at, length);
            exit(1);
        }
}

static void fill(char *bytes, int length, int round, int of) {
    for (int at = 0; at < length; at++) bytes[at] = byte(round, of, at);
}

static void rounds(int count) {
    for (int round = 0; round < count; round++) {
        /* Around what fits on the board, small, and large. */
        int length = round % 3 == 0 ? 470 + round % 40 : round % 3 == 1 ? round % 20 : round % 5000;
        char *own = malloc((size_t)length + 1), *all = malloc((size_t)length * (size_t)size + 1), **parts = calloc((size_t)size, sizeof *parts);
        int *lengths = calloc((size_t)size, sizeof *lengths);
        fill(own, length, round, 0);
        if (rank > 0) memset(own, 0, (size_t)length);
        check(LIBI_broadcast(own, length), "broadcast", round);
        expect(own, length, round, 0);
        for (int to = 0; to < size; to++) fill(all + to * length, length, round, to);
        memset(own, 0, (size_t)length);
        check(LIBI_scatter(all, length, own), "scatter", round);
        expect(own, length, round, rank);
        /* Who has given its part to one does not wait for the others. */
        for (int gathers = 0; gathers <= round % 4; gathers++) {
            memset(all, 0, (size_t)length * (size_t)size);
            fill(own, length, round + gathers, rank);
            check(LIBI_gather(own, length, all), "gather", round);
            for (int from = 0; rank == 0 && from < size; from++) expect(all + from * length, length, round + gathers, from);
        }
        fill(own, length, round, rank);
        if (round % 5 == 0) {
            check(LIBI_allgatherv(own, length * rank / size, (void **)parts, lengths), "allgather", round);
            for (int from = 0; from < size; from++) {
                if (lengths[from] != length * from / size) exit(2);
                expect(parts[from], lengths[from], round, from);
                free(parts[from]);
            }
        }
        if (round % 2 == 0) check(LIBI_barrier(), "barrier", round);
        free(own), free(all), free(parts), free(lengths);
    }
}

int main(int argc, char **argv) {
    char word[16] = "";
    check(LIBI_init(LIBI_VERSION, &argc, &argv), "init", 0);
    LIBI_getMyRank(&rank);
    LIBI_getSize(&size);
    if (strcmp(argv[1], "rounds") == 0) {
        rounds(atoi(argv[2]));
        return LIBI_finalize();
    }
    if (strcmp(argv[1], "leave") == 0) {
        char *all = calloc((size_t)size, sizeof word);
        if (rank == 0) usleep(300000);
        check(LIBI_gather(&rank, sizeof rank, all), "gather", 0);
        return 0;
    }
    check(LIBI_barrier(), "barrier", 0);
    if (strcmp(argv[1], "mixed") == 0) {
        if (rank == 0) strcpy(word, "a word");
        check(LIBI_broadcast(word, 6), "broadcast", 0);
        printf("%d %s\n", rank, word);
        return 0;
    }
    if (rank == 4 && strcmp(argv[1], "kill") == 0) raise(SIGKILL);
    if (rank == 4) return 0;
    for (int call = 0; call < 2; call++) {
        libi_rc_e rc = call == 0 ? LIBI_barrier() : LIBI_broadcast(word, 6);
        printf("%d %d %s\n", rank, rc, LIBI_missing());
    }
    return 0;
}
