/* A full disk where none can be mounted: loaded before a process (LD_PRELOAD), it lets writes below the folder NIGHT_FULL
   fail with ENOSPC, those of more than 64 KiB always and every one as soon as a file "hogged" lies in the folder. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int is_full(int fd, size_t count) {
  const char *folder = getenv("NIGHT_FULL");
  char link[64], path[PATH_MAX], hogged[PATH_MAX];
  if (!folder) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  size_t prefix = strlen(folder);
  if (strncmp(path, folder, prefix) || path[prefix] != '/') return 0;
  snprintf(hogged, sizeof hogged, "%s/hogged", folder);
  if (count <= 65536 && access(hogged, F_OK)) return 0;
  errno = ENOSPC;
  return 1;
}

ssize_t write(int fd, const void *data, size_t count) {
  static ssize_t (*real)(int, const void *, size_t);
  if (!real) real = (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
  return is_full(fd, count) ? -1 : real(fd, data, count);
}

ssize_t pwrite64(int fd, const void *data, size_t count, off64_t offset) {
  static ssize_t (*real)(int, const void *, size_t, off64_t);
  if (!real) real = (ssize_t(*)(int, const void *, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64");
  return is_full(fd, count) ? -1 : real(fd, data, count, offset);
}
