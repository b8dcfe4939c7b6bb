/* Stands in front of statvfs: a path in the file that HOLDFAST_HANGS names gets no answer for as
 * long as it stands there.  Loaded into the probe's child by LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

static int hangs(const char *path)
{
    const char *name = getenv("HOLDFAST_HANGS");
    FILE *list = name ? fopen(name, "r") : NULL;
    char line[4096];
    int found = 0;

    while (list && !found && fgets(line, sizeof line, list)) {
        line[strcspn(line, "\n")] = 0;
        found = strcmp(line, path) == 0;
    }
    if (list)
        fclose(list);
    return found;
}

int statvfs64(const char *path, struct statvfs64 *space)
{
    int (*real)(const char *, struct statvfs64 *);

    while (hangs(path))
        usleep(20000);
    *(void **)&real = dlsym(RTLD_NEXT, "statvfs64");
    return real(path, space);
}

int statvfs(const char *path, struct statvfs *space)
{
    return statvfs64(path, (struct statvfs64 *)space); /* the same on 64-bit machines */
}
