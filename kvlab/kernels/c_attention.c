/* Causal attention of one sequence on one thread, in fp32, three ways. Small and plain, so that what each of them must
   move to and from memory can be read off the loops; a cache simulator is run on them to see whether that is so.

   Legend: T = query token, S = kv token, Q = query head, K = kv head, G = query heads per kv head, D = head_dim,
   E = v_head_dim. Query token t stands at kv token S - T + t and sees the last `window` tokens (0: all), its own
   included. `space` is memory that the caller keeps; c_attention_space says how much. */
#include <math.h>

typedef struct {
    long Q, K, T, S, D, E, window;
    long k_head, k_row, v_head, v_row;      /* distances in K and V, in numbers; q is [T, Q, D], out [T, Q, E] */
    long q_tile, kv_tile;                   /* of c_flash */
} Shape;

static long least(long a, long b) { return a < b ? a : b; }
static long most(long a, long b) { return a > b ? a : b; }

static long end_of(const Shape *s, long t) { return s->S - s->T + t + 1; }
static long begin_of(const Shape *s, long t) { return s->window ? most(0, end_of(s, t) - s->window) : 0; }

static float dot(const float *a, const float *b, long n) {
    float sum = 0;
    for (long i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static void add(float *out, float weight, const float *x, long n) {
    for (long i = 0; i < n; i++) out[i] += weight * x[i];
}

static void scale(float *out, float by, long n) {
    for (long i = 0; i < n; i++) out[i] *= by;
}

static void zero(float *out, long n) {
    for (long i = 0; i < n; i++) out[i] = 0;
}

/* How many numbers of `space` a function needs. A row of scores takes an odd number of cache lines: rows whose
   distance is a power of two would share a few sets of the cache and push each other out. */
static long row_of(const Shape *s) { return ((s->S + 15) / 16 | 1) * 16; }
long c_naive_space(const Shape *s) { return s->T * row_of(s); }
long c_flash_space(const Shape *s) { return s->kv_tile + 2 * s->q_tile * (s->Q / s->K); }
long c_decode_space(const Shape *s) { return 2 * (s->Q / s->K); }

/* One query head after the other: its whole score matrix [T, S] is written, then its softmax over it, then read for the
   weighted sum. Blocks of 16 tokens (a cache line of scores), so that K and V are read once per query head. */
void c_naive(const Shape *s, const float *q, const float *k, const float *v, float *out, float *space) {
    const long T = s->T, S = s->S, D = s->D, E = s->E, length = row_of(s);
    for (long head = 0; head < s->Q; head++) {
        const float *k_SD = k + head / (s->Q / s->K) * s->k_head, *v_SE = v + head / (s->Q / s->K) * s->v_head;
        for (long low = 0; low < S; low += 16)
            for (long t = 0; t < T; t++)
                for (long token = low; token < least(low + 16, S); token++) {
                    const int seen = token >= begin_of(s, t) && token < end_of(s, t);
                    const float score = dot(q + (t * s->Q + head) * D, k_SD + token * s->k_row, D) / sqrtf((float)D);
                    space[t * length + token] = seen ? score : -INFINITY;
                }
        for (long t = 0; t < T; t++) {
            float *row = space + t * length, peak = -INFINITY, total = 0;
            for (long token = 0; token < S; token++) peak = fmaxf(peak, row[token]);
            for (long token = 0; token < S; token++) total += row[token] = expf(row[token] - peak);
            scale(row, 1 / total, S);
            zero(out + (t * s->Q + head) * E, E);
        }
        for (long low = 0; low < S; low += 16)
            for (long t = 0; t < T; t++)
                for (long token = low; token < least(low + 16, S); token++)
                    add(out + (t * s->Q + head) * E, space[t * length + token], v_SE + token * s->v_row, E);
    }
}

/* FlashAttention's algorithm: a tile of K and V meets a tile of queries of all heads of the group, with an online
   softmax. K and V are read once per tile of queries. Source: arXiv 2205.14135, Algorithm 1. */
void c_flash(const Shape *s, const float *q, const float *k, const float *v, float *out, float *space) {
    const long T = s->T, D = s->D, E = s->E, G = s->Q / s->K;
    float *score = space, *peaks = space + s->kv_tile, *totals = peaks + s->q_tile * G;
    for (long kv_head = 0; kv_head < s->K; kv_head++)
        for (long first = 0; first < T; first += s->q_tile) {
            const long rows = least(s->q_tile, T - first);
            for (long row = 0; row < rows * G; row++) {
                peaks[row] = -INFINITY, totals[row] = 0;
                zero(out + ((first + row / G) * s->Q + kv_head * G + row % G) * E, E);
            }
            for (long low = begin_of(s, first); low < end_of(s, first + rows - 1); low += s->kv_tile)
                for (long row = 0; row < rows * G; row++) {
                    const long t = first + row / G, head = kv_head * G + row % G;
                    const long begin = most(low, begin_of(s, t)), end = least(low + s->kv_tile, end_of(s, t));
                    if (begin >= end) continue;
                    const float *k_SD = k + kv_head * s->k_head, *v_SE = v + kv_head * s->v_head;
                    float *sum = out + (t * s->Q + head) * E, peak = peaks[row];
                    for (long token = begin; token < end; token++) {
                        score[token - begin] = dot(q + (t * s->Q + head) * D, k_SD + token * s->k_row, D)
                            / sqrtf((float)D);
                        peak = fmaxf(peak, score[token - begin]);
                    }
                    const float shrink = expf(peaks[row] - peak);
                    scale(sum, shrink, E);
                    totals[row] *= shrink, peaks[row] = peak;
                    for (long token = begin; token < end; token++) {
                        const float weight = expf(score[token - begin] - peak);
                        totals[row] += weight;
                        add(sum, weight, v_SE + token * s->v_row, E);
                    }
                }
            for (long row = 0; row < rows * G; row++)
                scale(out + ((first + row / G) * s->Q + kv_head * G + row % G) * E, 1 / totals[row], E);
        }
}

/* One query token: each token of K and V is read once and meets all heads of its group, with an online softmax. */
void c_decode(const Shape *s, const float *q, const float *k, const float *v, float *out, float *space) {
    const long D = s->D, E = s->E, G = s->Q / s->K;
    float *peaks = space, *totals = space + G;
    for (long kv_head = 0; kv_head < s->K; kv_head++) {
        const float *q_GD = q + kv_head * G * D;
        float *out_GE = out + kv_head * G * E;
        for (long g = 0; g < G; g++) peaks[g] = -INFINITY, totals[g] = 0;
        zero(out_GE, G * E);
        for (long token = begin_of(s, 0); token < s->S; token++) {
            const float *k_D = k + kv_head * s->k_head + token * s->k_row, *v_E = v + kv_head * s->v_head
                + token * s->v_row;
            for (long g = 0; g < G; g++) {
                const float score = dot(q_GD + g * D, k_D, D) / sqrtf((float)D), peak = fmaxf(peaks[g], score);
                if (peak > peaks[g]) {
                    const float shrink = expf(peaks[g] - peak);
                    scale(out_GE + g * E, shrink, E);
                    totals[g] *= shrink, peaks[g] = peak;
                }
                const float weight = expf(score - peak);
                totals[g] += weight;
                add(out_GE + g * E, weight, v_E, E);
            }
        }
        for (long g = 0; g < G; g++) scale(out_GE + g * E, 1 / totals[g], E);
    }
}
