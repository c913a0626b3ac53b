/* A member of the example's sessions: see frontend.c. */
#include "libi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(libi_rc_e rc, const char *what) {
    if (rc == LIBI_OK) return;
    fprintf(stderr, "%s: %d %s\n", what, rc, LIBI_missing());
    exit(1);
}

int main(int argc, char **argv) {
    int rank, size, length, part, sum = 0;
    char word[64] = "", kind = KIND, *kinds, *variable = getenv("EXAMPLE");
    void *question;
    check(LIBI_init(LIBI_VERSION, &argc, &argv), "init");
    check(LIBI_getMyRank(&rank), "rank");
    check(LIBI_getSize(&size), "size");
    int master = LIBI_amIMaster() == LIBI_YES, *parts = calloc((size_t)size, sizeof *parts);
    kinds = calloc((size_t)size + 1, 1);
    check(LIBI_recvUsrData(&question, &length), "receive");
    if (master) snprintf(word, sizeof word, "%s", (char *)question);
    check(LIBI_broadcast(word, sizeof word), "broadcast");
    for (int to = 0; master && to < size; to++) parts[to] = to * to;
    check(LIBI_scatter(parts, sizeof part, &part), "scatter");
    if (strcmp(word, "question") != 0 || part != rank * rank) return 1;
    part += argc;
    check(LIBI_gather(&part, sizeof part, parts), "gather");
    check(LIBI_gather(&kind, 1, kinds), "gather");
    check(LIBI_barrier(), "barrier");
    for (int from = 0; master && from < size; from++) sum += parts[from];
    char answer[256];
    length = snprintf(answer, sizeof answer, "%d members (%s), sum %d, %s, %s", size, kinds, sum, argc > 1 ? argv[argc - 1] : "-", variable ? variable : "-") + 1;
    check(LIBI_sendUsrData(answer, &length), "send");
    check(LIBI_finalize(), "finalize");
    return 0;
}
