/* The Distributed Large Memory library's functions for programs that were written for it (Midorikawa et al.), over hpcrt: no MPI, no library, no
 * compiler of its own. Start the program with `hpcrt exec --memory 'node[2-5]:20G' --local-mb N -- ./app`: where its data lie, how much of them stays on
 * its own node and which nodes lend the rest is said there, not in a memfile. Without --memory the data are ordinary memory.
 *
 * Programs that were never written for it need none of this: hpcrt does the same for what malloc gives them. */
#ifndef DLM_H
#define DLM_H

#include <stdlib.h>

/* Only rank 0 of such a program computes: its one process is that. Call it first. Returns 0. */
static inline int dlm_startup(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    return 0;
}

/* Memory that may lie on other nodes, zero at first; NULL and errno if there is none. */
static inline void *dlm_alloc(size_t bytes)
{
    return calloc(1, bytes);
}

/* Gives back what dlm_alloc gave; nodes that had some of it forget it. */
static inline void dlm_free(void *data)
{
    free(data);
}

/* The job ends its memory servers when the program ends. Call it last. Returns 0. */
static inline int dlm_shutdown(void)
{
    return 0;
}

/* As the papers spell them. */
#define dml_startup dlm_startup
#define dml_alloc dlm_alloc
#define dml_free dlm_free
#define dml_shutdown dlm_shutdown

#endif
