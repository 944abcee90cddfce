// Loaded before everything else (LD_PRELOAD): every block that torch allocates for a tensor ends at a page that cannot
// be touched, so that a kernel which reads or writes behind a tensor dies at that very instruction, as does one that
// uses a tensor after it was freed. Masked vector instructions are checked too, which sanitizers do not see. torch
// allocates the memory of tensors with posix_memalign; all other allocation stays as it is.
//
// Blocks are aligned as asked for, so a few bytes lie between a block's end and the page. They, and those in front of
// the block, hold a pattern that is looked at when the block is freed. Addresses are never used twice.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE ((size_t)4096)
#define REGION ((size_t)1 << 40)  // bytes of addresses; only what is in use takes memory
enum { PATTERN = 0xA5, FRONT = 64 };

typedef struct {
  size_t first, bytes, pages;  // of the block's pages: the first one's number, how many; and the block's size
} Block;

static char *region;
static Block *blocks;  // by the number of the page in which a block begins
static size_t used;    // pages given away so far
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void (*real_free)(void *);
static void *(*real_realloc)(void *, size_t);
static size_t (*real_usable)(void *);

static void die(const char *what) {
  if (write(2, what, strlen(what)) < 0) _exit(98);
  abort();
}

static char *reserve(size_t bytes, int protection) {
  char *p = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) die("guard: no addresses left\n");
  return p;
}

static Block *of(void *p) {
  char *at = p;
  if (!region || at < region || at >= region + REGION) return NULL;
  return &blocks[(size_t)(at - region) / PAGE];
}

int posix_memalign(void **out, size_t alignment, size_t bytes) {
  size_t pages = (bytes + FRONT + alignment + PAGE - 1) / PAGE;
  pthread_mutex_lock(&lock);
  if (!region) {
    blocks = (Block *)reserve(REGION / PAGE * sizeof(Block), PROT_READ | PROT_WRITE);
    region = reserve(REGION, PROT_NONE);
  }
  size_t first = used;
  used += pages + 1;  // the last one stays closed
  pthread_mutex_unlock(&lock);
  if (used * PAGE > REGION) die("guard: no addresses left\n");
  char *start = region + first * PAGE, *end = start + pages * PAGE;
  if (mprotect(start, pages * PAGE, PROT_READ | PROT_WRITE)) return ENOMEM;
  memset(start, PATTERN, pages * PAGE);
  *out = (void *)((uintptr_t)(end - bytes) / alignment * alignment);
  *of(*out) = (Block){first, bytes, pages};
  return 0;
}

void free(void *p) {
  Block *block = p ? of(p) : NULL;
  if (!block) {
    if (!real_free) real_free = dlsym(RTLD_NEXT, "free");
    if (p) real_free(p);
    return;
  }
  if (!block->pages) die("guard: freed twice\n");
  char *start = region + block->first * PAGE, *end = start + block->pages * PAGE;
  for (char *c = start; c < (char *)p; c++)
    if ((unsigned char)*c != PATTERN) die("guard: something was written in front of a tensor\n");
  for (char *c = (char *)p + block->bytes; c < end; c++)
    if ((unsigned char)*c != PATTERN) die("guard: something was written behind a tensor\n");
  madvise(start, block->pages * PAGE, MADV_DONTNEED);
  mprotect(start, block->pages * PAGE, PROT_NONE);
  block->pages = 0;
}

void *realloc(void *p, size_t bytes) {
  Block *block = p ? of(p) : NULL;
  if (!block) {
    if (!real_realloc) real_realloc = dlsym(RTLD_NEXT, "realloc");
    return real_realloc(p, bytes);
  }
  void *moved = malloc(bytes);
  if (moved) {
    memcpy(moved, p, block->bytes < bytes ? block->bytes : bytes);
    free(p);
  }
  return moved;
}

size_t malloc_usable_size(void *p) {
  Block *block = p ? of(p) : NULL;
  if (block) return block->bytes;
  if (!real_usable) real_usable = dlsym(RTLD_NEXT, "malloc_usable_size");
  return real_usable(p);
}
