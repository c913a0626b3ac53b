/* What files.c does about closing: who is told, and what is there for others then. */

#include <sys/socket.h>
#include <sys/un.h>

/* To a file system that tells nobody but who closes first that something is missing: which close is told. Nothing is said of a file that gets its number. */
static void late(const char *path, long how) {
    int fd = create(path), other;
    char bytes[64] = { 7 }, next[4096];
    for (int n = 0; n < 200; n++) CHECK(write(fd, bytes, sizeof bytes) == sizeof bytes);
    if (how == 1) CHECK(flock(fd, LOCK_EX) == 0);
    if (how == 2) CHECK((other = dup(fd)) >= 0 && close(fd) == -1 && errno == EDQUOT && close(other) == 0);
    if (how < 2) CHECK(close(fd) == -1 && errno == EDQUOT);
    snprintf(next, sizeof next, "%s.next", path);
    other = create(next);
    for (int n = 0; n < 200; n++) CHECK(write(other, bytes, sizeof bytes) == sizeof bytes);
    CHECK(close(other) == 0);
}

/* Numbers, each written with a lock that ends with a descriptor: of the lock's open file, or another one's; or before a socket is closed. Those that were
   written are counted in memory. */
static void locked(const char *path, long how, const char *count_path) {
    char name[4096];
    struct flock all = { .l_type = F_WRLCK };
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int fd = create(path), told = open(count_path, O_RDWR | O_CREAT, 0644), other = -1;
    CHECK(ftruncate(told, 4096) == 0);
    volatile uint64_t *done = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, told, 0);
    CHECK(done != MAP_FAILED);
    snprintf(name, sizeof name, "%s.lock", path);
    snprintf(address.sun_path, sizeof address.sun_path, "%s.socket", path);
    for (uint64_t n = 0; n < 200; n++) {
        int lock = how == 2 ? socket(AF_UNIX, SOCK_STREAM, 0) : open(name, O_RDWR | O_CREAT, 0644);
        CHECK(lock >= 0);
        if (how == 0) CHECK(flock(lock, LOCK_EX) == 0);
        if (how == 1) CHECK((other = open(name, O_RDONLY)) >= 0 && fcntl(lock, F_SETLKW, &all) == 0);
        if (how == 2) CHECK(connect(lock, (struct sockaddr *)&address, sizeof address) == 0);
        CHECK(write(fd, &n, sizeof n) == sizeof n);
        *done = n + 1;
        if (how == 1) CHECK(close(other) == 0);
        usleep(how == 1 ? 1000 : 0);
        if (how == 2) CHECK(close_range(lock, lock, 0) == 0);
        else CHECK(close(lock) == 0);
        usleep(1000);
    }
    CHECK(close(fd) == 0);
}
