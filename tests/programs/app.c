/* Links against libpart.so, found through RPATH, RUNPATH, $ORIGIN or LD_LIBRARY_PATH, and says what it got and who it is. */
#include <stdio.h>
#include <unistd.h>
const char *who(void);
int main(int argc, char **argv) {
    char exe[4096] = {0};
    if (readlink("/proc/self/exe", exe, sizeof exe - 1) < 0) perror("readlink");
    printf("%s %s %s", who(), exe, argv[0]);
    for (int i = 1; i < argc; i++) printf(" %s", argv[i]);
    putchar('\n');
    return 0;
}
