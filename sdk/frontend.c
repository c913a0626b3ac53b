/* The front end of an example: two sessions on the hosts that are named, started by one call, of two programs that member.c is compiled to.
 *
 *   cc -o frontend frontend.c libi.c
 *   cc -o middle -DKIND="'m'" member.c libi.c && cc -o back -DKIND="'b'" member.c libi.c
 *   ./frontend ./middle ./back n1 n2 n3 n4 */
#include "libi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(libi_rc_e rc, const char *what) {
    if (rc == LIBI_OK) return;
    fprintf(stderr, "%s: %d\n", what, rc);
    exit(1);
}

static host_dist_t *hosts(int count, char **names, unsigned int each) {
    host_dist_t *list = NULL;
    while (count-- > 0) {
        host_dist_t *host = malloc(sizeof *host);
        *host = (host_dist_t){names[count], each, list};
        list = host;
    }
    return list;
}

int main(int argc, char **argv) {
    if (argc < 5) return fprintf(stderr, "usage: frontend MIDDLE BACK HOST HOST...\n"), 2;
    int half = (argc - 3) / 2;
    char *quiet[] = {"back end", NULL}, *first[] = {"middle", "it's", NULL};
    libi_env_t variable = {"EXAMPLE", "of a session", NULL};
    libi_sess_handle_t middle, back;
    check(LIBI_fe_init(LIBI_VERSION), "init");
    check(LIBI_fe_createSession(&middle), "create");
    check(LIBI_fe_createSession(&back), "create");
    check(LIBI_fe_addToSessionEnvironment(back, &variable), "environment");
    variable.name = "ANOTHER";
    check(LIBI_fe_addToSessionEnvironment(back, &variable), "environment");
    /* Two programs in the first session, one in the second. */
    proc_dist_req_t all[] = {
        {middle, argv[1], first, hosts(half, argv + 3, 1)},
        {middle, argv[2], NULL, hosts(half, argv + 3, 2)},
        {back, argv[2], quiet, hosts(argc - 3 - half, argv + 3 + half, 2)},
    };
    check(LIBI_fe_launch(all, 3), "launch");
    libi_sess_handle_t both[] = {middle, back};
    for (int nth = 0; nth < 2; nth++) {
        char question[] = "question", **list;
        void *answer;
        int length;
        unsigned int size;
        check(LIBI_fe_sendUsrData(both[nth], question, sizeof question), "send");
        check(LIBI_fe_recvUsrData(both[nth], &answer, &length), "receive");
        check(LIBI_fe_getHostlist(both[nth], &list, &size), "hosts");
        printf("%s\n", (char *)answer);
        for (unsigned int rank = 0; rank < size; rank++) printf("%s%s", list[rank], rank + 1 < size ? " " : "\n");
    }
    for (int nth = 0; nth < 2; nth++) check(LIBI_fe_finalize(both[nth]), "finalize");
    return 0;
}
