/* The cost of a call into a library, in nanoseconds, from the program and from a library that it opens. */
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>
#ifdef LIBRARY
int next(int x) { return x + 1; }
#elif defined PLUGIN
int next(int);
int work(int n) {
    int s = 0;
    for (int i = 0; i < n; i++) s = next(s);
    return s;
}
#else
int next(int);
static int own(int n) {
    int s = 0;
    for (int i = 0; i < n; i++) s = next(s);
    return s;
}
/* The best of many: others use the processor, too. */
static double cost(int (*work)(int)) {
    double best = 1e9;
    for (int i = 0; i < 50; i++) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        work(100000);
        clock_gettime(CLOCK_MONOTONIC, &b);
        double ns = ((b.tv_sec - a.tv_sec) * 1e9 + b.tv_nsec - a.tv_nsec) / 1e5;
        if (ns < best) best = ns;
    }
    return best;
}
int main(int argc, char **argv) {
    void *plugin = dlopen(argv[argc - 1], RTLD_LAZY);
    if (!plugin) return fprintf(stderr, "%s\n", dlerror()), 1;
    double from_program = cost(own);
    printf("%.2f %.2f\n", from_program, cost((int (*)(int))dlsym(plugin, "work")));
    return 0;
}
#endif
