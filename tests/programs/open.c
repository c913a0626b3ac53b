/* dlopen by name (RUNPATH), by path, by a path through a link, of two libraries with one soname, and of one that is not there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>
static void *get(const char *name) {
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) { printf("%s: %s\n", name, dlerror()); return 0; }
    const char *(*who)(void) = (const char *(*)(void))dlsym(library, "who");
    struct link_map *map = 0;
    dlinfo(library, RTLD_DI_LINKMAP, &map);
    printf("%s: %s from %s\n", name, who ? who() : "nobody", map->l_name);
    return library;
}
int main(int argc, char **argv) {
    void *first = 0;
    for (int i = 1; i < argc; i++) {
        void *library = get(argv[i]);
        if (i == 1) first = library; else if (library == first) puts("the same as the first");
    }
    get("libnowhere.so");
    return 0;
}
