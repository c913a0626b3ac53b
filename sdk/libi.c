/* See libi.h. The protocol: docs/COLLECTIVES.md. */
#define _GNU_SOURCE
#include "libi.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* A conversation with hpcrt: requests and replies of items. */
struct link {
    int fd;
    const char *at, *end; /* of the reply: what is here and not taken, in the buffer or on the board */
    char buffer[1 << 16];
};

/* Memory that the members of a host share with hpcrt's agent: it sees the calls of all at once, and wakes all at once. */
struct cell {
    uint32_t length; /* of a request, then of its reply; 0: that comes over the link */
    uint32_t rest;
    char bytes[496];
};
struct slot {
    uint64_t turns; /* replies so far; above them, ASKED each, requests */
    uint64_t rest;
    struct cell cells[2]; /* of every other request: one more may be made before the last is answered */
};
#define ASKED ((uint64_t)1 << 32)
struct board {
    uint32_t bell;    /* grows with every reply */
    uint32_t calling; /* members that are not answered */
    uint32_t members; /* who makes `calling` this tells the agent to look */
    uint32_t patient; /* unless he calls for what rank 0 gives: the agent looks when that is there */
    uint32_t rest[124];
    struct slot slots[];
};

struct libi_session {
    struct link link;
    libi_env_t *variables;
    pid_t hpcrt;
    char **hosts; /* of each rank */
    unsigned int size;
    struct libi_session *next;
};

static struct libi_session *sessions;
static int begun;
static struct link member = {.fd = -1};
static struct board *board;
static struct slot *mine;
static uint32_t asked;     /* requests on the board */
static int on_board;       /* the last request stands there, and so will its reply */
static int unheeded;       /* for the last request there, or the one before, nobody has waited */
static pid_t myself;
static int my_rank, my_size;
static char missing[256];

const char *LIBI_missing(void) { return missing; }

static int put(struct link *link, const void *bytes, size_t length) {
    const char *at = bytes;
    while (length > 0) {
        ssize_t sent = send(link->fd, at, length, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) return -1;
        at += sent;
        length -= (size_t)sent;
    }
    return 0;
}

/* The cell of this request when it is answered; NULL if nobody answers any more. */
static struct cell *wait_for_board(uint32_t request) {
    for (int looked = 0;;) {
        uint32_t bell = __atomic_load_n(&board->bell, __ATOMIC_SEQ_CST);
        struct timespec second = {.tv_sec = 1};
        char byte;
        uint32_t answered = (uint32_t)__atomic_load_n(&mine->turns, __ATOMIC_SEQ_CST);
        if ((int32_t)(answered - request) >= 0) return &mine->cells[(request - 1) % 2];
        if (syscall(SYS_futex, &board->bell, FUTEX_WAIT, bell, &second, NULL, 0) == 0 || errno != ETIMEDOUT) continue;
        if (recv(member.fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) return NULL;
        /* Somebody does not come: the agent must know who waits, and since when. */
        if (!looked++ && put(&member, "look\n", 5) < 0) return NULL;
    }
}

static int fill(struct link *link) {
    ssize_t got;
    if (link == &member && on_board) {
        struct cell *cell = wait_for_board(asked), *before = &mine->cells[asked % 2];
        on_board = 0;
        /* What failed first is told first. */
        if (cell && unheeded && (before->length == 0 || memcmp(before->bytes, "ok ", 3) != 0)) cell = before;
        unheeded = 0;
        if (!cell || cell->length > sizeof cell->bytes) return -1;
        if (cell->length > 0) {
            link->at = cell->bytes;
            link->end = cell->bytes + cell->length;
            return 0;
        }
    }
    do got = recv(link->fd, link->buffer, sizeof link->buffer, 0);
    while (got < 0 && errno == EINTR);
    link->at = link->buffer;
    link->end = link->buffer + (got > 0 ? got : 0);
    return got > 0 ? 0 : -1;
}

static int take(struct link *link, void *to, size_t length) {
    char *at = to;
    while (length > 0) {
        if (link->at == link->end && fill(link) < 0) return -1;
        size_t here = (size_t)(link->end - link->at), part = here < length ? here : length;
        memcpy(at, link->at, part);
        link->at += part;
        at += part;
        length -= part;
    }
    return 0;
}

/* A line with a number. The C library's functions for numbers would be most of the time that a member needs for an operation. */
static int take_number(struct link *link, size_t *number) {
    *number = 0;
    for (;;) {
        if (link->at == link->end && fill(link) < 0) return -1;
        char byte = *link->at++;
        if (byte == '\n') return 0;
        if (byte < '0' || byte > '9') return -1;
        *number = *number * 10 + (size_t)(byte - '0');
    }
}

/* Writes a line with a number; returns its end. */
static char *put_number(char *to, size_t number) {
    char digits[20];
    int count = 0;
    do digits[count++] = (char)('0' + number % 10);
    while ((number /= 10) > 0);
    while (count > 0) *to++ = digits[--count];
    *to++ = '\n';
    return to;
}

/* The request in its cell is complete; `given`: rank 0 gives what it is for. */
static libi_rc_e post(struct cell *cell, size_t length, int given) {
    cell->length = (uint32_t)length;
    uint64_t before = __atomic_fetch_add(&mine->turns, ASKED, __ATOMIC_SEQ_CST);
    on_board = 1;
    asked++;
    /* Whose last call is not answered is counted already. */
    if ((uint32_t)before != (uint32_t)(before >> 32)) return LIBI_OK;
    uint32_t calling = __atomic_add_fetch(&board->calling, 1, __ATOMIC_SEQ_CST);
    if (calling < __atomic_load_n(&board->members, __ATOMIC_SEQ_CST)) return LIBI_OK;
    if (given && __atomic_load_n(&board->patient, __ATOMIC_SEQ_CST)) return LIBI_OK;
    return put(&member, "look\n", 5) < 0 ? LIBI_EIO : LIBI_OK;
}

static libi_rc_e reply(struct link *link, int *count);

/* Waits for the request that nobody has waited for. */
static libi_rc_e heed(void) {
    int count;
    if (!unheeded) return LIBI_OK;
    unheeded = 0;
    return reply(&member, &count);
}

static void leave(void) {
    if (myself == getpid()) heed();
}

/* Requests: of one's own, collective ones, and those for what rank 0 gives. */
enum kind { OWN, CALL, GIVEN };

/* Sends `count` items of `each` bytes, which follow each other in memory. */
static libi_rc_e ask(struct link *link, const char *verb, const void *items, int count, size_t each, enum kind kind) {
    char head[64], length[32], *end = stpcpy(head, verb);
    *end++ = ' ';
    size_t size = (size_t)(put_number(end, (size_t)count) - head);
    size_t digits = (size_t)(put_number(length, each) - length);
    size_t total = size + (size_t)count * (digits + each);
    struct cell *cell = kind != OWN && mine && total <= sizeof cell->bytes ? &mine->cells[asked % 2] : NULL;
    libi_rc_e rc = !cell && link == &member ? heed() : LIBI_OK;
    if (rc != LIBI_OK) return rc;
    /* Nothing of the last reply is left there. */
    char *start = cell ? cell->bytes : link->buffer, *at = start, *full = link->buffer + sizeof link->buffer;
    memcpy(at, head, size);
    at += size;
    for (int item = 0; item < count; item++) {
        const char *bytes = (const char *)items + (size_t)item * each;
        if (!cell && (size_t)(full - at) < digits + each) {
            if (put(link, start, (size_t)(at - start)) < 0) return LIBI_EIO;
            at = start;
        }
        memcpy(at, length, digits);
        at += digits;
        if (!cell && (size_t)(full - at) < each) {
            if (put(link, start, (size_t)(at - start)) < 0 || put(link, bytes, each) < 0) return LIBI_EIO;
            at = start;
        } else if (each > 0) {
            memcpy(at, bytes, each);
            at += each;
        }
    }
    if (cell) return post(cell, total, kind == GIVEN);
    return put(link, start, (size_t)(at - start)) < 0 ? LIBI_EIO : LIBI_OK;
}

/* The head of a reply: how many items follow. */
static libi_rc_e reply(struct link *link, int *count) {
    char text[1024];
    size_t length = 3, items;
    *count = 0;
    if (take(link, text, length) < 0) return LIBI_EIO;
    if (memcmp(text, "ok ", length) == 0) {
        if (take_number(link, &items) < 0) return LIBI_EIO;
        *count = (int)items;
        return LIBI_OK;
    }
    for (char byte; take(link, &byte, 1) == 0 && byte != '\n';)
        if (length + 1 < sizeof text) text[length++] = byte;
    text[length] = 0;
    /* From now on every call fails at once, and nobody waits for the others. */
    if (link == &member) mine = NULL;
    if (strncmp(text, "lost ", 5) == 0 || strncmp(text, "late ", 5) == 0) {
        sscanf(text + 5, "%255s", missing);
        return LIBI_ELOST;
    }
    fprintf(stderr, "LIBI: %s\n", text);
    return LIBI_EIO;
}

/* Items of a length that is known. */
static libi_rc_e fixed(struct link *link, int count, void *to, size_t each) {
    for (int nth = 0; nth < count; nth++) {
        size_t length;
        if (take_number(link, &length) < 0 || length != each) return LIBI_EIO;
        if (take(link, (char *)to + (size_t)nth * each, each) < 0) return LIBI_EIO;
    }
    return LIBI_OK;
}

/* An item in memory of its own, with a zero behind it. */
static libi_rc_e own(struct link *link, void **to, size_t *length) {
    char *bytes;
    if (take_number(link, length) < 0 || !(bytes = malloc(*length + 1))) return LIBI_EIO;
    bytes[*length] = 0;
    *to = bytes;
    return take(link, bytes, *length) < 0 ? LIBI_EIO : LIBI_OK;
}

/* A request whose reply has one item of any length, or none. */
static libi_rc_e message(struct link *link, const char *verb, void **to, int *length) {
    int count;
    size_t bytes = 0;
    *to = NULL;
    *length = 0;
    libi_rc_e rc = ask(link, verb, NULL, 0, 0, OWN);
    if (rc == LIBI_OK) rc = reply(link, &count);
    if (rc == LIBI_OK && count == 1) rc = own(link, to, &bytes);
    *length = (int)bytes;
    return rc;
}

static libi_rc_e done(struct link *link) {
    int count;
    return reply(link, &count);
}

/* Asks for a place on the board, of this layout; without one (an agent that knows none, or another) everything goes over the link. */
static void join_board(void) {
    char space[CMSG_SPACE(sizeof(int))], reply[64] = "";
    struct iovec part = {reply, sizeof reply - 1};
    struct msghdr head = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    int memory = -1, slot, digits;
    if (put(&member, "board1 0\n", 9) < 0) return;
    while (recvmsg(member.fd, &head, MSG_CMSG_CLOEXEC) < 0 && errno == EINTR) {}
    struct cmsghdr *control = CMSG_FIRSTHDR(&head);
    if (control && control->cmsg_type == SCM_RIGHTS) memcpy(&memory, CMSG_DATA(control), sizeof memory);
    off_t length = memory < 0 ? -1 : lseek(memory, 0, SEEK_END);
    if (length > 0 && sscanf(reply, "ok 1\n%d\n%d", &digits, &slot) == 2) {
        void *at = mmap(NULL, (size_t)length, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
        if (at != MAP_FAILED) {
            board = at;
            mine = &board->slots[slot];
        }
    }
    if (memory >= 0) close(memory);
}

libi_rc_e LIBI_init(int version, int *argc, char ***argv) {
    const char *fd = getenv("HPCRT_FD"), *rank = getenv("HPCRT_RANK"), *size = getenv("HPCRT_SIZE");
    (void)argc, (void)argv;
    if (version > LIBI_VERSION) return LIBI_NOTIMPL;
    if (!fd || !rank || !size) return LIBI_EINIT;
    member.fd = atoi(fd);
    my_rank = atoi(rank);
    my_size = atoi(size);
    if (!mine) join_board();
    if (!myself) atexit(leave);
    myself = getpid();
    return LIBI_OK;
}

libi_rc_e LIBI_finalize(void) {
    if (member.fd < 0) return LIBI_EINIT;
    libi_rc_e rc = heed();
    close(member.fd);
    member.fd = -1;
    return rc;
}

libi_rc_e LIBI_amIMaster(void) { return member.fd < 0 ? LIBI_EINIT : my_rank == 0 ? LIBI_YES : LIBI_NO; }

libi_rc_e LIBI_getMyRank(int *rank) {
    *rank = my_rank;
    return member.fd < 0 ? LIBI_EINIT : LIBI_OK;
}

libi_rc_e LIBI_getSize(int *size) {
    *size = my_size;
    return member.fd < 0 ? LIBI_EINIT : LIBI_OK;
}

/* A collective call: what this member gives, and where the items of the reply go. */
static libi_rc_e collective(const char *verb, const void *give, int count, int each, void *to, int expected) {
    int got;
    if (member.fd < 0) return LIBI_EINIT;
    if (each < 0) return LIBI_EIO;
    libi_rc_e rc = ask(&member, verb, give, count, (size_t)each, count == 0 && expected == 1 ? GIVEN : CALL);
    if (rc == LIBI_OK) rc = reply(&member, &got);
    if (rc == LIBI_OK && got != expected) rc = LIBI_EIO;
    return rc == LIBI_OK ? fixed(&member, got, to, (size_t)each) : rc;
}

libi_rc_e LIBI_barrier(void) { return collective("barrier", NULL, 0, 0, NULL, 0); }

libi_rc_e LIBI_broadcast(void *buffer, int bytes) { return collective("broadcast", buffer, my_rank == 0, bytes, buffer, 1); }

libi_rc_e LIBI_gather(void *send, int bytes_each, void *receive) {
    if (member.fd < 0 || bytes_each < 0 || my_rank == 0 || unheeded)
        return collective("gather", send, 1, bytes_each, receive, my_rank == 0 ? my_size : 0);
    /* Who has given its part waits with its next call, or before it ends. */
    libi_rc_e rc = ask(&member, "gather", send, 1, (size_t)bytes_each, CALL);
    unheeded = rc == LIBI_OK && on_board;
    return rc == LIBI_OK && !on_board ? done(&member) : rc;
}

libi_rc_e LIBI_scatter(void *send, int bytes_each, void *receive) {
    return collective("scatter", send, my_rank == 0 ? my_size : 0, bytes_each, receive, 1);
}

libi_rc_e LIBI_allgatherv(void *send, int bytes, void **receive, int *lengths) {
    int count;
    if (member.fd < 0) return LIBI_EINIT;
    if (bytes < 0) return LIBI_EIO;
    libi_rc_e rc = ask(&member, "allgather", send, 1, (size_t)bytes, CALL);
    if (rc == LIBI_OK) rc = reply(&member, &count);
    for (int rank = 0; rc == LIBI_OK && rank < count; rank++) {
        size_t length = 0;
        rc = own(&member, &receive[rank], &length);
        lengths[rank] = (int)length;
    }
    return rc;
}

libi_rc_e LIBI_recvUsrData(void **to, int *length) {
    libi_rc_e rc = member.fd < 0 ? LIBI_EINIT : LIBI_OK;
    *to = NULL;
    *length = 0;
    if (rc == LIBI_OK && my_rank == 0) rc = message(&member, "receive", to, length);
    return rc == LIBI_OK ? LIBI_barrier() : rc;
}

static int is_message(int length) { return length >= 0 && length <= LIBI_MAX_BUFFER_LENGTH; }

libi_rc_e LIBI_sendUsrData(void *from, int *length) {
    if (member.fd < 0) return LIBI_EINIT;
    libi_rc_e rc = LIBI_OK;
    if (my_rank == 0) {
        rc = is_message(*length) ? ask(&member, "send", from, 1, (size_t)*length, OWN) : LIBI_EIO;
        if (rc == LIBI_OK) rc = done(&member);
    }
    /* The others are there already. */
    libi_rc_e met = LIBI_barrier();
    return rc == LIBI_OK ? met : rc;
}

libi_rc_e LIBI_fe_init(int version) {
    begun = 1;
    return version > LIBI_VERSION ? LIBI_NOTIMPL : LIBI_OK;
}

libi_rc_e LIBI_fe_createSession(libi_sess_handle_t *session) {
    if (!begun) return LIBI_EINIT;
    struct libi_session *new = calloc(1, sizeof *new);
    if (!new) return LIBI_EIO;
    new->link.fd = -1;
    new->next = sessions;
    *session = sessions = new;
    return LIBI_OK;
}

static struct libi_session *find(libi_sess_handle_t session) {
    struct libi_session *known = sessions;
    while (known && known != session) known = known->next;
    return known;
}

libi_rc_e LIBI_fe_addToSessionEnvironment(libi_sess_handle_t session, libi_env_t *variables) {
    if (!find(session)) return LIBI_ESESS;
    libi_env_t **end = &session->variables;
    while (*end) end = &(*end)->next;
    for (; variables; variables = variables->next) {
        libi_env_t *own = calloc(1, sizeof *own);
        if (!own) return LIBI_EIO;
        *end = own;
        end = &own->next;
        own->name = strdup(variables->name);
        own->value = strdup(variables->value);
        if (!own->name || !own->value) return LIBI_EIO;
    }
    return LIBI_OK;
}

/* A word of a line: in quotes, between which the quotes of the word itself stand. */
static int word(FILE *file, const char *text) {
    putc(' ', file);
    putc('\'', file);
    for (; *text; text++) {
        if (*text == '\n') return -1;
        if (*text == '\'') fputs("'\"'\"'", file);
        else putc(*text, file);
    }
    putc('\'', file);
    return 0;
}

/* The line of one program in a file for --configfile. */
static int program(FILE *file, const proc_dist_req_t *request) {
    unsigned int count = 0;
    fputs("--hosts ", file);
    for (host_dist_t *host = request->hd; host; host = host->next) {
        fprintf(file, "%s%s:%u", count > 0 ? "," : "", host->hostname, host->nproc);
        count += host->nproc;
    }
    fprintf(file, " -n %u", count);
    for (libi_env_t *one = request->sessionHandle->variables; one; one = one->next) {
        char *pair;
        if (!one->name || !one->value || asprintf(&pair, "%s=%s", one->name, one->value) < 0) return -1;
        fputs(" -x", file);
        int bad = word(file, pair);
        free(pair);
        if (bad) return -1;
    }
    fputs(" --", file);
    if (count == 0 || word(file, request->proc_path) < 0) return -1;
    for (char **argument = request->proc_argv; argument && *argument; argument++)
        if (word(file, *argument) < 0) return -1;
    putc('\n', file);
    return 0;
}

static libi_rc_e start(struct libi_session *session, proc_dist_req_t requests[], int count) {
    int ends[2], front, bad = 0;
    char command[256];
    FILE *file = tmpfile();
    if (!file) return LIBI_ELAUNCH;
    for (int nth = 0; nth < count; nth++)
        if (requests[nth].sessionHandle == session) bad |= program(file, &requests[nth]);
    if (bad || fflush(file) || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0) {
        fclose(file);
        return LIBI_ELAUNCH;
    }
    session->hpcrt = fork();
    if (session->hpcrt == 0) {
        front = dup(ends[1]);
        /* The file is opened again by its name, from its beginning. */
        snprintf(command, sizeof command, "eval \"exec ${HPCRT_EXEC:-hpcrt exec} -q --stdin none --front %d --configfile /proc/self/fd/%d\"",
                 front, dup(fileno(file)));
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    fclose(file);
    close(ends[1]);
    session->link.fd = ends[0];
    return session->hpcrt < 0 ? LIBI_ELAUNCH : LIBI_OK;
}

/* Where the ranks are; known as soon as all are ordered. */
static libi_rc_e ask_hosts(struct libi_session *session) {
    int count;
    size_t length;
    libi_rc_e rc = ask(&session->link, "members", NULL, 0, 0, OWN);
    if (rc == LIBI_OK) rc = reply(&session->link, &count);
    if (rc != LIBI_OK || !(session->hosts = calloc((size_t)count + 1, sizeof *session->hosts))) return rc == LIBI_OK ? LIBI_EIO : rc;
    for (int rank = 0; rc == LIBI_OK && rank < count; rank++) rc = own(&session->link, (void **)&session->hosts[rank], &length);
    session->size = (unsigned int)count;
    return rc;
}

libi_rc_e LIBI_fe_launch(proc_dist_req_t distributions[], int count) {
    if (!begun) return LIBI_EINIT;
    for (int nth = 0; nth < count; nth++) {
        if (!find(distributions[nth].sessionHandle)) return LIBI_ESESS;
        if (distributions[nth].sessionHandle->hpcrt) return LIBI_ESESSALREADYLAUNCHED;
    }
    for (int nth = 0; nth < count; nth++) {
        struct libi_session *session = distributions[nth].sessionHandle;
        if (!session->hpcrt && start(session, distributions, count) != LIBI_OK) return LIBI_ELAUNCH;
    }
    /* All start at the same time. */
    for (int nth = 0; nth < count; nth++) {
        if (!distributions[nth].sessionHandle->hosts && ask_hosts(distributions[nth].sessionHandle) != LIBI_OK) return LIBI_ELAUNCH;
    }
    return LIBI_OK;
}

libi_rc_e LIBI_fe_getMaxMsgBufLen(int *length) {
    *length = LIBI_MAX_BUFFER_LENGTH;
    return LIBI_OK;
}

libi_rc_e LIBI_fe_sendUsrData(libi_sess_handle_t session, void *from, int length) {
    if (!find(session) || session->link.fd < 0) return LIBI_ESESS;
    if (!is_message(length)) return LIBI_EIO;
    libi_rc_e rc = ask(&session->link, "send", from, 1, (size_t)length, OWN);
    return rc == LIBI_OK ? done(&session->link) : rc;
}

libi_rc_e LIBI_fe_recvUsrData(libi_sess_handle_t session, void **to, int *length) {
    if (!find(session) || session->link.fd < 0) return LIBI_ESESS;
    return message(&session->link, "receive", to, length);
}

libi_rc_e LIBI_fe_getHostlist(libi_sess_handle_t session, char ***hosts, unsigned int *size) {
    libi_rc_e rc = LIBI_fe_getHostlistSize(session, size);
    if (rc != LIBI_OK) return rc;
    if (!(*hosts = calloc((size_t)*size + 1, sizeof **hosts))) return LIBI_EIO;
    for (unsigned int rank = 0; rank < *size; rank++)
        if (!((*hosts)[rank] = strdup(session->hosts[rank]))) return LIBI_EIO;
    return LIBI_OK;
}

libi_rc_e LIBI_fe_getHostlistSize(libi_sess_handle_t session, unsigned int *size) {
    if (!find(session) || !session->hosts) return LIBI_ESESS;
    *size = session->size;
    return LIBI_OK;
}

libi_rc_e LIBI_fe_finalize(libi_sess_handle_t session) {
    int status = 0;
    if (!find(session)) return LIBI_ESESS;
    if (session->link.fd >= 0) close(session->link.fd);
    /* Of a child that somebody else has reaped it is not known. */
    if (session->hpcrt > 0)
        while (waitpid(session->hpcrt, &status, 0) < 0 && (status = -1) && errno == EINTR) {}
    for (struct libi_session **at = &sessions; *at; at = &(*at)->next)
        if (*at == session) {
            *at = session->next;
            for (char **host = session->hosts; host && *host; host++) free(*host);
            free(session->hosts);
            for (libi_env_t *one = session->variables, *next; one; one = next) {
                next = one->next;
                free(one->name);
                free(one->value);
                free(one);
            }
            free(session);
            break;
        }
    return status == 0 ? LIBI_OK : LIBI_EIO;
}
