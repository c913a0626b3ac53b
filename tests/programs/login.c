/* A login that keeps its starter busy for 0.2 s, one at a time: login DIR HOST COMMAND... */
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

int main(int argc, char **argv) {
    char busy[4096];
    snprintf(busy, sizeof busy, "%s/busy.%d", argv[1], (int)getppid());
    int lock = open(busy, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (argc < 4 || lock < 0 || flock(lock, LOCK_EX) < 0) return 1;
    usleep(200000);
    execvp(argv[3], argv + 3);
    return 127;
}
