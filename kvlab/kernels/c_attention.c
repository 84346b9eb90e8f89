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

enum { BLOCK = 64, FEW = 32 };              /* tokens summed by themselves: fp32 sums of 16,384 in a row drift */

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

/* out += the weighted sum of n rows of V, block by block. part: E numbers. */
static void weigh(float *out, const float *weight, const float *v, long v_row, long n, long E, float *part) {
    for (long first = 0; first < n; first += BLOCK) {
        zero(part, E);
        for (long i = first; i < least(first + BLOCK, n); i++) add(part, weight[i], v + i * v_row, E);
        add(out, 1, part, E);
    }
}

/* Softmax without its division: x becomes exp(x - peak); returns the total. */
static float exponentials(float *x, float peak, long n) {
    float total = 0;
    for (long first = 0; first < n; first += BLOCK) {
        float part = 0;
        for (long i = first; i < least(first + BLOCK, n); i++) part += x[i] = expf(x[i] - peak);
        total += part;
    }
    return total;
}

/* One query head of one token meets n tokens of K and V, with an online softmax: peak, total and sum are of all tokens
   that it has met. score: n numbers, part: E. */
static void meet(const Shape *s, const float *q_D, const float *k_SD, const float *v_SE, long n,
                 float *peak, float *total, float *sum_E, float *score, float *part) {
    float highest = *peak;
    for (long i = 0; i < n; i++) {
        score[i] = dot(q_D, k_SD + i * s->k_row, s->D) / sqrtf((float)s->D);
        highest = fmaxf(highest, score[i]);
    }
    const float shrink = expf(*peak - highest);
    if (shrink != 1) scale(sum_E, shrink, s->E);
    *total = *total * shrink + exponentials(score, highest, n);
    *peak = highest;
    weigh(sum_E, score, v_SE, s->v_row, n, s->E, part);
}

/* How many numbers of `space` a function needs. A row of scores takes an odd number of cache lines: rows whose
   distance is a power of two would share a few sets of the cache and push each other out. */
static long row_of(const Shape *s) { return ((s->S + 15) / 16 | 1) * 16; }
long c_naive_space(const Shape *s) { return s->T * row_of(s) + s->E; }
long c_flash_space(const Shape *s) { return s->kv_tile + s->E + 2 * s->q_tile * (s->Q / s->K); }
long c_decode_space(const Shape *s) { return FEW + s->E + 2 * (s->Q / s->K); }

/* One query head after the other: its whole score matrix [T, S] is written, then its softmax over it, then read for the
   weighted sum. All three go row by row, so that the matrix is walked in one order; each row walks all of K, or V. */
void c_naive(const Shape *s, const float *q, const float *k, const float *v, float *out, float *space) {
    const long T = s->T, S = s->S, D = s->D, E = s->E, length = row_of(s);
    for (long head = 0; head < s->Q; head++) {
        const float *k_SD = k + head / (s->Q / s->K) * s->k_head, *v_SE = v + head / (s->Q / s->K) * s->v_head;
        for (long t = 0; t < T; t++)
            for (long token = 0; token < S; token++) {
                const int seen = token >= begin_of(s, t) && token < end_of(s, t);
                const float score = dot(q + (t * s->Q + head) * D, k_SD + token * s->k_row, D) / sqrtf((float)D);
                space[t * length + token] = seen ? score : -INFINITY;
            }
        for (long t = 0; t < T; t++) {
            float *row = space + t * length, peak = -INFINITY;
            for (long token = 0; token < S; token++) peak = fmaxf(peak, row[token]);
            scale(row, 1 / exponentials(row, peak, S), S);
        }
        for (long t = 0; t < T; t++) {
            zero(out + (t * s->Q + head) * E, E);
            weigh(out + (t * s->Q + head) * E, space + t * length, v_SE, s->v_row, S, E, space + T * length);
        }
    }
}

/* FlashAttention's algorithm: a tile of K and V meets a tile of queries of all heads of the group, with an online
   softmax. K and V are read once per tile of queries. Source: arXiv 2205.14135, Algorithm 1. */
void c_flash(const Shape *s, const float *q, const float *k, const float *v, float *out, float *space) {
    const long T = s->T, D = s->D, E = s->E, G = s->Q / s->K;
    float *score = space, *part = score + s->kv_tile, *peaks = part + E, *totals = peaks + s->q_tile * G;
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
                    if (begin < end)
                        meet(s, q + (t * s->Q + head) * D, k + kv_head * s->k_head + begin * s->k_row,
                             v + kv_head * s->v_head + begin * s->v_row, end - begin,
                             &peaks[row], &totals[row], out + (t * s->Q + head) * E, score, part);
                }
            for (long row = 0; row < rows * G; row++)
                scale(out + ((first + row / G) * s->Q + kv_head * G + row % G) * E, 1 / totals[row], E);
        }
}

/* One query token: each few tokens of K and V (few enough for the first-level cache) are read once and meet all heads of
   their group. */
void c_decode(const Shape *s, const float *q, const float *k, const float *v, float *out, float *space) {
    const long D = s->D, E = s->E, G = s->Q / s->K;
    float *score = space, *part = score + FEW, *peaks = part + E, *totals = peaks + G;
    for (long kv_head = 0; kv_head < s->K; kv_head++) {
        const float *q_GD = q + kv_head * G * D;
        float *out_GE = out + kv_head * G * E;
        for (long g = 0; g < G; g++) peaks[g] = -INFINITY, totals[g] = 0;
        zero(out_GE, G * E);
        for (long first = begin_of(s, 0); first < s->S; first += FEW)
            for (long g = 0; g < G; g++)
                meet(s, q_GD + g * D, k + kv_head * s->k_head + first * s->k_row,
                     v + kv_head * s->v_head + first * s->v_row, least(FEW, s->S - first),
                     &peaks[g], &totals[g], out_GE + g * E, score, part);
        for (long g = 0; g < G; g++) scale(out_GE + g * E, 1 / totals[g], E);
    }
}
