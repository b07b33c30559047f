/* The bandwidth floor of a momentum step: one pass that reads params, gradients and momentum and
 * writes params and momentum in place, five floats per parameter. No LARS step can do with fewer
 * bytes: its norms are free only if every tensor stays in cache between two uses. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stddef.h>

#define MOST_THREADS 64

typedef struct {
  float *params, *momentum;
  const float *grads;
  size_t begin, end;
} slice;

static void *run(void *argument) {
  const slice *s = argument;
  float *restrict params = s->params;
  float *restrict momentum = s->momentum;
  const float *restrict grads = s->grads;
  for (size_t i = s->begin; i < s->end; i++) {
    momentum[i] = 0.9f * momentum[i] - 1e-4f * grads[i];
    params[i] += momentum[i];
  }
  return NULL;
}

/* One thread on each processor that we may use, pinned: left alone, two of them often share one. */
int momentum_pass(float *params, float *momentum, const float *grads, size_t n) {
  pthread_t threads[MOST_THREADS];
  slice slices[MOST_THREADS];
  cpu_set_t allowed, one;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return -1;
  size_t count = CPU_COUNT(&allowed), started = 0;
  if (count > MOST_THREADS) count = MOST_THREADS;
  for (int cpu = 0; cpu < CPU_SETSIZE && started < count; cpu++) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    pthread_attr_t attributes;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_attr_init(&attributes);
    pthread_attr_setaffinity_np(&attributes, sizeof one, &one);
    slices[started] = (slice){params, momentum, grads, n * started / count,
                              n * (started + 1) / count};
    int failed = pthread_create(&threads[started], &attributes, run, &slices[started]);
    pthread_attr_destroy(&attributes);
    if (failed) break;
    started++;
  }
  for (size_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
  return started == count ? 0 : -1;
}
