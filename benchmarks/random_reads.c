// Reads records at random places of a file without the page cache, by several threads.
//
//   random_reads FILE RECORD_BYTES READS THREADS SEED     prints reads a second
//
// Blocks of the disk are read whole, 4096 bytes at least, since O_DIRECT takes no less.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int file;
static long block, blocks, reads_of_thread;

static void* reads(void* seed) {
  uint64_t state = (uint64_t)(uintptr_t)seed * 0x9E3779B97F4A7C15u + 1;
  void* data;
  if (posix_memalign(&data, 4096, block)) exit(1);
  for (long i = 0; i < reads_of_thread; ++i) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    if (pread(file, data, block, (long)(state % blocks) * block) < 0) {
      perror("pread");
      exit(1);
    }
  }
  return NULL;
}

int main(int count, char** words) {
  if (count != 6) return 2;
  block = (atol(words[2]) + 4095) / 4096 * 4096;
  const int num_threads = atoi(words[4]);
  reads_of_thread = atol(words[3]) / num_threads;
  file = open(words[1], O_RDONLY | O_DIRECT);
  struct stat status;
  if (file < 0 || fstat(file, &status)) return perror(words[1]), 1;
  blocks = status.st_size / block;
  pthread_t threads[256];
  struct timespec began, ended;
  clock_gettime(CLOCK_MONOTONIC, &began);
  for (int i = 0; i < num_threads; ++i) {
    pthread_create(&threads[i], NULL, reads, (void*)(uintptr_t)(atol(words[5]) * 256 + i + 1));
  }
  for (int i = 0; i < num_threads; ++i) pthread_join(threads[i], NULL);
  clock_gettime(CLOCK_MONOTONIC, &ended);
  const double seconds =
      (double)(ended.tv_sec - began.tv_sec) + 1e-9 * (double)(ended.tv_nsec - began.tv_nsec);
  printf("%.1f\n", (double)(reads_of_thread * num_threads) / seconds);
  return 0;
}
