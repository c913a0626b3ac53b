/* For programs that check everything against what it must be. */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static inline void check(int good, const char *what)
{
    if (!good) {
        fprintf(stderr, "wrong: %s (errno %d)\n", what, errno);
        _exit(1);
    }
}

static inline uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

/* Everything was: with the most KiB of its memory that were here at once. */
static inline void right(void)
{
    char line[200];
    FILE *f = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, "VmHWM:", 6))
            printf("resident %ld\n", atol(line + 6));
    puts("right");
}
