/* The bandwidth floors of the benchmarks, as fast as this machine's memory allows. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stddef.h>

#define MOST_THREADS 64
/* Sums kept apart, so that the compiler may add them as vectors. */
#define LANES 64

typedef struct {
  float *params, *momentum;
  const float *grads;
  float sum;
  size_t begin, end;
} slice;

static void *momentum_slice(void *argument) {
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

static void *read_slice(void *argument) {
  slice *s = argument;
  const float *restrict values = s->params;
  float sums[LANES] = {0};
  size_t i = s->begin;
  for (; i + LANES <= s->end; i += LANES)
    for (size_t j = 0; j < LANES; j++) sums[j] += values[i + j];
  s->sum = 0;
  for (; i < s->end; i++) s->sum += values[i];
  for (size_t j = 0; j < LANES; j++) s->sum += sums[j];
  return NULL;
}

/* The norms' pass: the sums of squares of params and gradients. */
static void *squares_slice(void *argument) {
  slice *s = argument;
  const float *restrict params = s->params;
  const float *restrict grads = s->grads;
  float sums[LANES] = {0};
  size_t i = s->begin;
  for (; i + LANES <= s->end; i += LANES)
    for (size_t j = 0; j < LANES; j++)
      sums[j] += params[i + j] * params[i + j] + grads[i + j] * grads[i + j];
  s->sum = 0;
  for (; i < s->end; i++) s->sum += params[i] * params[i] + grads[i] * grads[i];
  for (size_t j = 0; j < LANES; j++) s->sum += sums[j];
  return NULL;
}

/* One thread on each processor that we may use, pinned: left alone, two of them often share one. */
static int on_all_cores(void *(*run)(void *), slice whole, float *sum) {
  pthread_t threads[MOST_THREADS];
  slice slices[MOST_THREADS];
  cpu_set_t allowed, one;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return -1;
  size_t n = whole.end, count = CPU_COUNT(&allowed), started = 0;
  if (count > MOST_THREADS) count = MOST_THREADS;
  for (int cpu = 0; cpu < CPU_SETSIZE && started < count; cpu++) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    pthread_attr_t attributes;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_attr_init(&attributes);
    pthread_attr_setaffinity_np(&attributes, sizeof one, &one);
    slices[started] = whole;
    slices[started].begin = n * started / count;
    slices[started].end = n * (started + 1) / count;
    int failed = pthread_create(&threads[started], &attributes, run, &slices[started]);
    pthread_attr_destroy(&attributes);
    if (failed) break;
    started++;
  }
  for (size_t i = 0; i < started; i++) {
    pthread_join(threads[i], NULL);
    if (sum) *sum += slices[i].sum;
  }
  return started == count ? 0 : -1;
}

/* The norms first, from params and gradients; then these and the momentum are read, and params and
 * momentum written in place: seven floats per parameter, the floor of the method. */
int lars_passes(float *params, float *momentum, const float *grads, size_t n) {
  slice whole = {.params = params, .momentum = momentum, .grads = grads, .end = n};
  float sum = 0;
  int failed = on_all_cores(squares_slice, whole, &sum);
  return on_all_cores(momentum_slice, whole, NULL) || failed || sum < 0 ? -1 : 0;
}

/* Reads and adds up all values. */
int read_pass(float *values, float *sum, size_t n) {
  slice whole = {.params = values, .end = n};
  *sum = 0;
  return on_all_cores(read_slice, whole, sum);
}
