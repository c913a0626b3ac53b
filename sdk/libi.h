/* LIBI over hpcrt: a front end starts sessions of processes on many hosts; the processes of a session talk to each other and, through
 * their master (rank 0), to the front end. Compile libi.c, as C, with the program; nothing else is needed. docs/COLLECTIVES.md.
 *
 * The front end runs hpcrt as `$HPCRT_EXEC` says (a shell command; default: hpcrt exec), so flags such as --agent belong there. */
#ifndef LIBI_H
#define LIBI_H

#ifdef __cplusplus
extern "C" {
#endif

#define LIBI_VERSION 1
/* Bytes in one message or in what one member gives to a collective call, at most; what all give to one together: 64 MiB. */
#define LIBI_MAX_BUFFER_LENGTH (4 << 20)

typedef enum {
    LIBI_OK,
    LIBI_YES,
    LIBI_NO,
    LIBI_NOTIMPL,
    LIBI_EINIT,                /* LIBI_init or LIBI_fe_init comes first, or this process is no member */
    LIBI_ELAUNCH,              /* the processes could not be started; hpcrt has said why */
    LIBI_ESESS,                /* no such session, or it is not launched */
    LIBI_EFRONTENDONLY,        /* kept for its number */
    LIBI_ESESSALREADYLAUNCHED,
    LIBI_EIO,                  /* the job has ended, or the call contradicts those of the others */
    LIBI_ELOST                 /* members are missing: LIBI_missing says which */
} libi_rc_e;

typedef struct libi_session *libi_sess_handle_t;

typedef struct libi_host {
    char *hostname;
    unsigned int nproc;
    struct libi_host *next;
} host_dist_t;

typedef struct libi_env {
    char *name;
    char *value;
    struct libi_env *next;
} libi_env_t;

/* One program of a session. Those with the same session become one group, with ranks in this order. */
typedef struct {
    libi_sess_handle_t sessionHandle;
    char *proc_path;
    char **proc_argv; /* arguments behind the name, ended by NULL; or NULL */
    host_dist_t *hd;  /* where, and how many */
} proc_dist_req_t;

/* The front end. */
libi_rc_e LIBI_fe_init(int version);
libi_rc_e LIBI_fe_createSession(libi_sess_handle_t *session);
/* What was added before stays; the list is copied. */
libi_rc_e LIBI_fe_addToSessionEnvironment(libi_sess_handle_t session, libi_env_t *variables);
/* Starts all programs; returns when hpcrt has ordered them on every host. */
libi_rc_e LIBI_fe_launch(proc_dist_req_t distributions[], int count);
libi_rc_e LIBI_fe_getMaxMsgBufLen(int *length);
libi_rc_e LIBI_fe_sendUsrData(libi_sess_handle_t session, void *message, int length);
/* The message is the caller's, to free(). */
libi_rc_e LIBI_fe_recvUsrData(libi_sess_handle_t session, void **message, int *length);
libi_rc_e LIBI_fe_getHostlistSize(libi_sess_handle_t session, unsigned int *size);
/* The host of each rank; the array and its strings are the caller's. */
libi_rc_e LIBI_fe_getHostlist(libi_sess_handle_t session, char ***hosts, unsigned int *size);
/* Waits for the session's processes to end. LIBI_EIO: the exit code of hpcrt was not 0. */
libi_rc_e LIBI_fe_finalize(libi_sess_handle_t session);

/* The members. Every collective call is made by all members of the session, in the same order, and returns when all have made it; but a
 * gather may return at once for all but the master, and what goes wrong with it is told by the next call. */
libi_rc_e LIBI_init(int version, int *argc, char ***argv);
libi_rc_e LIBI_finalize(void);
libi_rc_e LIBI_amIMaster(void); /* LIBI_YES or LIBI_NO */
libi_rc_e LIBI_getMyRank(int *rank);
libi_rc_e LIBI_getSize(int *size);
libi_rc_e LIBI_barrier(void);
/* The master's bytes come to all. */
libi_rc_e LIBI_broadcast(void *buffer, int bytes);
/* The master gets every member's bytes, by rank; the others' `receive` is not looked at. */
libi_rc_e LIBI_gather(void *send, int bytes_each, void *receive);
/* Every member gets its part of the master's bytes. */
libi_rc_e LIBI_scatter(void *send, int bytes_each, void *receive);
/* As gather, but of different lengths and for all: receive[r], of lengths[r] bytes, is the caller's, to free(). */
libi_rc_e LIBI_allgatherv(void *send, int bytes, void **receive, int *lengths);
/* Collective: the master moves the message from or to the front end, the others get or give nothing. */
libi_rc_e LIBI_recvUsrData(void **message, int *length);
libi_rc_e LIBI_sendUsrData(void *message, int *length);
/* After LIBI_ELOST: the missing ranks, as "3,5-7". */
const char *LIBI_missing(void);

#ifdef __cplusplus
}
/* As LIBI for C++ has it. */
inline libi_rc_e LIBI_fe_createSession(libi_sess_handle_t &session) { return LIBI_fe_createSession(&session); }
#endif
#endif
