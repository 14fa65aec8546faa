/* Work on the host that torch and NumPy do in several passes: joining 0/1 masks, weighing them, weighted sums.

   Called through ctypes by host_kernels.py, which says what each function computes. Nothing here knows Python or torch:
   addresses and counts come checked. With OpenMP, whose threads are then torch's; without it, on one thread. */

#include <limits.h> /* for __GLIBC__ too */
#include <stdint.h>

/* To be counted up with every change of what host_kernels.py passes: it leaves an older library alone. */
const int64_t mrl_interface = 1;

/* Tokens that are read twice, or with several rows, while they stay in cache. */
enum { BLOCK = 2048, BLOCK_OF_ROWS = 32768, LANES = 32 };

/* Compiled twice; which one runs is chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define VECTORISED __attribute__((target_clones("avx2", "default")))
#endif
#endif
#ifndef VECTORISED
#define VECTORISED
#endif

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* One mask to bytes: returns the number of ones, and sets *odd if an entry is neither 0 nor 1. */
#define FLAGS_OF(name, type, is_odd)                                                              \
    VECTORISED static int64_t name(const void *mask, int64_t length, uint8_t *flags, int *odd) {  \
        int64_t ones = 0;                                                                         \
        for (int64_t from = 0; from < length; from += BLOCK) {                                    \
            int64_t size = least(BLOCK, length - from);                                           \
            const type *x = (const type *)mask + from;                                            \
            int32_t count = 0, seen = 0;                                                          \
            for (int64_t j = 0; j < size; j++) {                                                  \
                count += x[j] != 0;                                                               \
                seen |= is_odd(x[j]);                                                             \
            }                                                                                     \
            for (int64_t j = 0; j < size; j++) flags[from + j] = x[j] != 0;                       \
            ones += count;                                                                        \
            *odd |= seen != 0;                                                                    \
        }                                                                                         \
        return ones;                                                                              \
    }

#define ODD_INT(x) ((x) & ~1)
#define ODD_LONG(x) (((x) & ~(int64_t)1) != 0)
#define ODD_FLOAT(x) (!((x) == 0 || (x) == 1)) /* NaN too */

FLAGS_OF(flags_of_u8, uint8_t, ODD_INT)
FLAGS_OF(flags_of_i16, int16_t, ODD_INT)
FLAGS_OF(flags_of_i32, int32_t, ODD_INT)
FLAGS_OF(flags_of_i64, int64_t, ODD_LONG)
FLAGS_OF(flags_of_f32, float, ODD_FLOAT)
FLAGS_OF(flags_of_f64, double, ODD_FLOAT)

/* In the order of _KINDS in host_kernels.py. */
static int64_t (*const FLAGS_OF_KIND[])(const void *, int64_t, uint8_t *, int *) = {
    flags_of_u8, flags_of_i16, flags_of_i32, flags_of_i64, flags_of_f32, flags_of_f64,
};

int mrl_join_flags(int64_t kind, int64_t num_samples, int64_t total_tokens, const void *const *masks,
                   const int64_t *lengths, const int64_t *starts, uint8_t *flags, int64_t *ones, int64_t num_threads) {
    int odd = 0;
    int64_t first = num_samples ? starts[0] : total_tokens;
    for (int64_t at = 0; at < first; at++) flags[at] = 0;
#pragma omp parallel for num_threads(num_threads) schedule(static) reduction(| : odd)
    for (int64_t i = 0; i < num_samples; i++) {
        int64_t next = i + 1 < num_samples ? starts[i + 1] : total_tokens;
        ones[i] = FLAGS_OF_KIND[kind](masks[i], lengths[i], flags + starts[i], &odd);
        for (int64_t at = starts[i] + lengths[i]; at < next; at++) flags[at] = 0;
    }
    return odd;
}

VECTORISED static void weigh(const uint8_t *flags, float weight, int64_t size, float *weights) {
    for (int64_t j = 0; j < size; j++) weights[j] = (float)flags[j] * weight;
}

void mrl_weigh_flags(int64_t num_samples, int64_t num_segments, int64_t num_local, const uint8_t *flags,
                     const int64_t *starts, const int64_t *segment_starts, const int64_t *segment_lengths,
                     const float *sample_weights, float *weights, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t part = 0; part < num_threads; part++) {
        int64_t from = num_local * part / num_threads, to = num_local * (part + 1) / num_threads;
        int64_t sample = 0, local = 0; /* local: where the segment begins in the weights */
        for (int64_t s = 0; s < num_segments && local < to; local += segment_lengths[s++]) {
            int64_t end = segment_starts[s] + least(segment_lengths[s], to - local);
            int64_t at = segment_starts[s] + (from > local ? from - local : 0);
            while (at < end) { /* one sample after the other; what lies between them is 0 */
                while (sample + 1 < num_samples && starts[sample + 1] <= at) sample++;
                int64_t stop = sample + 1 < num_samples ? least(end, starts[sample + 1]) : end;
                weigh(flags + at, sample_weights[sample], stop - at, weights + local + (at - segment_starts[s]));
                at = stop;
            }
        }
    }
}

VECTORISED static double weighted_sum(const float *x, const float *weights, int64_t size) {
    float lanes[LANES] = {0};
    double sum = 0;
    int64_t j = 0;
    for (; j + LANES <= size; j += LANES)
        for (int k = 0; k < LANES; k++) lanes[k] += x[j + k] * weights[j + k];
    for (; j < size; j++) sum += x[j] * weights[j];
    for (int k = 0; k < LANES; k++) sum += lanes[k];
    if (sum - sum == 0) return sum;
    sum = 0; /* 0 * NaN is NaN: again, without the tokens that do not count */
    for (j = 0; j < size; j++) sum += weights[j] != 0 ? x[j] * weights[j] : 0;
    return sum;
}

void mrl_weighted_sums(int64_t num_rows, int64_t num_tokens, const float *const *rows, const float *weights,
                       double *sums, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t part = 0; part < num_threads; part++) {
        int64_t from = num_tokens * part / num_threads, to = num_tokens * (part + 1) / num_threads;
        for (int64_t at = from; at < to; at += BLOCK_OF_ROWS)
            for (int64_t r = 0; r < num_rows; r++)
                sums[part * num_rows + r] += weighted_sum(rows[r] + at, weights + at, least(BLOCK_OF_ROWS, to - at));
    }
}
