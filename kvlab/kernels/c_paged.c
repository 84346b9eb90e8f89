/* Decode attention over a block-stored KV cache, read in place: grouped heads, any block size, codes decoded in
 * registers, tokens split over threads and merged by their log-sum-exp.
 *
 * Legend: B = sequence, K = kv head, G = query heads of a group, D = width of K, E = width of V, P = slot in block,
 * L = lanes of a vector. Scores are kept in powers of two: exp(x) = 2^(x / ln 2).
 * The caller has checked the block table; this file looks at it again, since one wild read would end the process.
 */
#include <math.h>
#include <string.h>
#include "c_codes.h"

#define CHUNK 16                /* tokens whose scores are held at once; a multiple of every L */
#define ROWS 4                  /* query heads that share one pass over a chunk, in registers */

typedef struct {                /* one side of the cache; strides in elements */
    const void *codes;
    long block, head, slot;
    const float *scale;         /* one value for `tokens` slots of a head, or NULL */
    long scale_block, scale_head, scale_row, tokens;
    const float *channel;       /* one value for each channel of a head, or NULL */
    long channel_head;
} Side;

typedef struct {
    long B, K, G, D, E, kind_k, kind_v, block_size, num_blocks, table_row, heads, threads;
    float softcap;              /* 0: none */
} Shape;

/* Scores of n tokens against R query heads: score[r][i] = q[r] · k[i], in powers of two. */
static inline __attribute__((always_inline)) void scores(int kind, int R, const float *q, long D, const char *const *k,
                                                         const char *const *next, int n, float (*score)[CHUNK])
{
    long whole = D / L * L, bytes = BYTES[kind];
    int i = 0;
    for (; i + 4 <= n; i += 4) {
        vf sums[4][ROWS];
        for (int j = 0; j < 4; j++)
            for (int r = 0; r < R; r++)
                sums[j][r] = (vf){0};
        for (long d = 0; d < whole; d += L) {
            vf x[4];
            for (int j = 0; j < 4; j++) {
                x[j] = load(kind, k[i + j] + d * bytes);
                if (d * bytes % LINE == 0)
                    __builtin_prefetch(next[i + j] + d * bytes, 0, 2);     /* into L2 */
            }
            for (int r = 0; r < R; r++) {
                vf y = *(const vf *)(q + r * D + d);
                for (int j = 0; j < 4; j++)
                    sums[j][r] += x[j] * y;
            }
        }
        for (int j = 0; j < 4; j++)
            for (int r = 0; r < R; r++)
                score[r][i + j] = sum(sums[j][r]);
    }
    for (; i < n; i++)
        for (int r = 0; r < R; r++) {
            vf total = {0};
            for (long d = 0; d < whole; d += L)
                total += load(kind, k[i] + d * bytes) * *(const vf *)(q + r * D + d);
            score[r][i] = sum(total);
        }
    for (long d = whole; d < D; d++)
        for (int j = 0; j < n; j++)
            for (int r = 0; r < R; r++)
                score[r][j] += load_one(kind, k[j] + d * bytes) * q[r * D + d];
}

/* acc[r] += weight[r][i] · v[i] over n tokens. */
static inline __attribute__((always_inline)) void weigh(int kind, int R, float (*weight)[CHUNK], long E,
                                                        const char *const *v, const char *const *next, int n, float *acc)
{
    const int many = L == 16 ? 2 : 1, W = R == 1 ? 8 : R == 2 ? 4 * many : 2 * many;    /* vectors kept in registers */
    long bytes = BYTES[kind], e = 0;
    for (; e + W * L <= E; e += W * L) {
        vf sums[ROWS][8];
        for (int r = 0; r < R; r++)
            for (int j = 0; j < W; j++)
                sums[r][j] = *(vf *)(acc + r * E + e + j * L);
        for (int i = 0; i < n; i++) {
            for (long b = 0; b < W * L * bytes; b += LINE)
                __builtin_prefetch(next[i] + e * bytes + b, 0, 2);
            for (int j = 0; j < W; j++) {
                vf x = load(kind, v[i] + (e + j * L) * bytes);
                for (int r = 0; r < R; r++)
                    sums[r][j] += weight[r][i] * x;
            }
        }
        for (int r = 0; r < R; r++)
            for (int j = 0; j < W; j++)
                *(vf *)(acc + r * E + e + j * L) = sums[r][j];
    }
    for (; e + L <= E; e += L)
        for (int i = 0; i < n; i++)
            for (int r = 0; r < R; r++)
                *(vf *)(acc + r * E + e) += weight[r][i] * load(kind, v[i] + e * bytes);
    for (; e < E; e++)
        for (int i = 0; i < n; i++)
            for (int r = 0; r < R; r++)
                acc[r * E + e] += weight[r][i] * load_one(kind, v[i] + e * bytes);
}

/* The same with kind, rows and the usual width known at compile time. */
#define WITH_ROWS(f, kind, ...)                                                                                        \
    switch (R) {                                                                                                       \
    case 1: f(kind, 1, __VA_ARGS__); break;                                                                            \
    case 2: f(kind, 2, __VA_ARGS__); break;                                                                            \
    case 3: f(kind, 3, __VA_ARGS__); break;                                                                            \
    default: f(kind, 4, __VA_ARGS__);                                                                                  \
    }
#define WITH_KIND(f, ...)                                                                                              \
    switch (kind) {                                                                                                    \
    case FP32: WITH_ROWS(f, FP32, __VA_ARGS__) break;                                                                      \
    case FP16: WITH_ROWS(f, FP16, __VA_ARGS__) break;                                                                      \
    case BF16: WITH_ROWS(f, BF16, __VA_ARGS__) break;                                                                      \
    case E4M3: WITH_ROWS(f, E4M3, __VA_ARGS__) break;                                                                      \
    case E5M2: WITH_ROWS(f, E5M2, __VA_ARGS__) break;                                                                      \
    default: WITH_ROWS(f, INT8, __VA_ARGS__)                                                                           \
    }

static void all_scores(int kind, int R, const float *q, long D, const char *const *k, const char *const *next, int n,
                       float (*score)[CHUNK])
{
    if (D == 128)
        WITH_KIND(scores, q, 128, k, next, n, score)
    else
        WITH_KIND(scores, q, D, k, next, n, score)
}

static void all_weigh(int kind, int R, float (*weight)[CHUNK], long E, const char *const *v, const char *const *next,
                      int n, float *acc)
{
    if (E == 128)
        WITH_KIND(weigh, weight, 128, v, next, n, acc)
    else
        WITH_KIND(weigh, weight, E, v, next, n, acc)
}

/* Scores to weights: caps, scales, and the running maximum and sum of a row; acc shrinks where the maximum grew. */
static void soften(const Shape *s, const float *k_scale, const float *v_scale, int n, float *x, float *highest,
                   float *total, float *acc)
{
    float top = *highest;
    if (k_scale)
        for (int i = 0; i < n; i++)
            x[i] *= k_scale[i];
    for (int i = n; i < CHUNK; i++)
        x[i] = -INFINITY;
    if (s->softcap > 0)
        for (int i = 0; i < CHUNK; i += L) {
            vf y = *(vf *)(x + i) * (1.0f / s->softcap), away = either(y < 0, -y, y), square = y * y;
            vf shrunk = power(away * -2.88539008f);                             /* exp(-2 |y|) */
            vf far = (1.0f - shrunk) / (1.0f + shrunk);
            vf near = away * (1.0f - square * (0.33333333f - square * (0.13333333f - square * 0.05396825f)));
            vf capped = either(away < 0.1f, near, far) * (s->softcap * 1.44269504f);    /* near 0 the quotient cancels */
            *(vf *)(x + i) = either(y < 0, -capped, capped);
        }
    for (int i = 0; i < n; i++)
        top = x[i] > top ? x[i] : top;
    if (top > *highest) {
        float shrink = exp2f(*highest - top);
        *highest = top;
        *total *= shrink;
        for (long e = 0; e < s->E; e++)
            acc[e] *= shrink;
    }
    vf sums = {0};
    for (int i = 0; i < CHUNK; i += L)
        *(vf *)(x + i) = power(*(vf *)(x + i) - top);
    for (int i = n; i < CHUNK; i++)
        x[i] = 0;
    for (int i = 0; i < CHUNK; i += L)
        sums += *(vf *)(x + i);
    *total += sum(sums);
    if (v_scale)
        for (int i = 0; i < n; i++)
            x[i] *= v_scale[i];
}

/* n stored rows as floats, so that many query heads need not decode each for itself. */
static void decode_rows(int kind, long width, const char *const *rows, int n, float *out, const char **decoded)
{
    long bytes = BYTES[kind];
    for (int i = 0; i < n; i++) {
        float *to = out + i * width;
        long d = 0;
        for (; d + L <= width; d += L)
            *(vf *)(to + d) = load(kind, rows[i] + d * bytes);
        for (; d < width; d++)
            to[d] = load_one(kind, rows[i] + d * bytes);
        decoded[i] = (const char *)to;
    }
}

/* Where the tokens of a chunk lie on a side, in elements from head 0, and their scales' places. */
typedef struct {
    long at[CHUNK], scale[CHUNK];
} Places;

static int place(const Shape *s, const Side *side, const int *table, long first, int n, Places *out)
{
    int bad = 0;
    for (int i = 0; i < n; i++) {
        long block = table[(first + i) / s->block_size], slot = (first + i) % s->block_size;
        if (block < 0 || block >= s->num_blocks) {
            bad = 1;
            block = 0;
        }
        out->at[i] = block * side->block + slot * side->slot;
        out->scale[i] = side->scale ? block * side->scale_block + slot / side->tokens * side->scale_row : 0;
    }
    for (int i = n; i < CHUNK; i++)
        out->at[i] = n ? out->at[n - 1] : 0;
    return bad;
}

static void rows_of(const Side *side, long bytes, const Places *p, long h, const char **rows)
{
    for (int i = 0; i < CHUNK; i++)
        rows[i] = (const char *)side->codes + (p->at[i] + h * side->head) * bytes;
}

static const float *scales_of(const Side *side, const Places *p, long h, int n, float *out)
{
    if (!side->scale)
        return 0;
    for (int i = 0; i < n; i++)
        out[i] = side->scale[p->scale[i] + h * side->scale_head];
    return out;
}

/* Tokens first … last of one sequence for the kv heads from … to: running maximum, sum and weighted V of each row. */
static int attend(const Shape *s, const Side *ks, const Side *vs, const float *q, const int *table, long first, long last,
                  long from, long to, float *highest, float *total, float *acc)
{
    long G = s->G, k_bytes = BYTES[s->kind_k], v_bytes = BYTES[s->kind_v];
    float k_rows[CHUNK * s->D] __attribute__((aligned(64))), v_rows[CHUNK * s->E] __attribute__((aligned(64)));
    Places places[2][2];
    int bad = 0, now = 0, n = last - first < CHUNK ? last - first : CHUNK;
    for (long r = from * G; r < to * G; r++) {
        highest[r] = -INFINITY;
        total[r] = 0;
        memset(acc + r * s->E, 0, s->E * sizeof(float));
    }
    if (n <= 0)
        return 0;
    bad |= place(s, ks, table, first, n, &places[0][0]) | place(s, vs, table, first, n, &places[0][1]);
    while (n > 0) {
        long after = first + n;
        int following = last - after < CHUNK ? last - after : CHUNK;
        Places *here = places[now], *there = places[!now];
        if (following > 0)
            bad |= place(s, ks, table, after, following, there) | place(s, vs, table, after, following, there + 1);
        else
            memcpy(there, here, 2 * sizeof *here);
        for (long h = from; h < to; h++) {
            const char *k[CHUNK], *v[CHUNK], *next_k[CHUNK], *next_v[CHUNK];
            float k_scale[CHUNK], v_scale[CHUNK];
            int kind_k = s->kind_k, kind_v = s->kind_v;
            rows_of(ks, k_bytes, here, h, k);
            rows_of(vs, v_bytes, here + 1, h, v);
            rows_of(ks, k_bytes, h + 1 < to ? here : there, h + 1 < to ? h + 1 : from, next_k);
            rows_of(vs, v_bytes, h + 1 < to ? here + 1 : there + 1, h + 1 < to ? h + 1 : from, next_v);
            const float *kx = scales_of(ks, here, h, n, k_scale), *vx = scales_of(vs, here + 1, h, n, v_scale);
            if (G > ROWS && kind_k != FP32)
                decode_rows(kind_k, s->D, k, n, k_rows, k), kind_k = FP32;
            if (G > ROWS && kind_v != FP32)
                decode_rows(kind_v, s->E, v, n, v_rows, v), kind_v = FP32;
            for (long r = h * G; r < (h + 1) * G; r += ROWS) {
                int R = (h + 1) * G - r < ROWS ? (h + 1) * G - r : ROWS;
                float score[ROWS][CHUNK] __attribute__((aligned(64)));
                all_scores(kind_k, R, q + r * s->D, s->D, k, next_k, n, score);
                for (int j = 0; j < R; j++)
                    soften(s, kx, vx, n, score[j], highest + r + j, total + r + j, acc + (r + j) * s->E);
                all_weigh(kind_v, R, score, s->E, v, next_v, n, acc + r * s->E);
            }
        }
        now = !now;
        first = after;
        n = following;
    }
    return bad;
}

/* Whether it was compiled to use several threads. */
int c_paged_threads(void)
{
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

/* Floats that a call needs beside its output: q as it is multiplied, and each part's results. */
long c_paged_space(const Shape *s, long splits)
{
    return s->B * s->K * s->G * (s->D + splits * (s->E + 2));
}

/* q [B, K·G, D] and out [B, K·G, E] in fp32, lse [B, K·G] or NULL; tokens firsts[b] … lasts[b] - 1 of each sequence.
 * Returns 1 where a block id was out of range, and out is then worth nothing; else 0. */
int c_paged(const Shape *s, const Side *ks, const Side *vs, const float *q, const int *tables, const long *firsts,
            const long *lasts, long splits, float *space, float *out, float *lse)
{
    long Q = s->K * s->G, rows = s->B * Q, groups = (s->K + s->heads - 1) / s->heads, bad = 0;
    float *turned = space, *highest = turned + rows * s->D, *total = highest + splits * rows, *acc = total + splits * rows;
    float scale = gain(s->kind_k) / sqrtf(s->D) * (s->softcap > 0 ? 1.0f : 1.44269504f);
    for (long r = 0; r < rows; r++) {
        const float *channel = ks->channel ? ks->channel + r % Q / s->G * ks->channel_head : 0;
        for (long d = 0; d < s->D; d++)
            turned[r * s->D + d] = q[r * s->D + d] * scale * (channel ? channel[d] : 1.0f);
    }
#pragma omp parallel for num_threads(s->threads) schedule(dynamic, 1) reduction(| : bad) if (s->threads > 1)
    for (long i = 0; i < s->B * groups * splits; i++) {
        long split = i % splits, group = i / splits % groups, b = i / splits / groups;
        long each = (lasts[b] - firsts[b] + splits - 1) / splits;
        each = (each + CHUNK - 1) / CHUNK * CHUNK;
        long first = firsts[b] + split * each, last = first + each < lasts[b] ? first + each : lasts[b];
        long from = group * s->heads, to = from + s->heads < s->K ? from + s->heads : s->K, part = split * rows + b * Q;
        bad |= attend(s, ks, vs, turned + b * Q * s->D, tables + b * s->table_row, first, last, from, to, highest + part,
                      total + part, acc + part * s->E);
    }
    for (long r = 0; r < rows; r++) {
        float top = -INFINITY, whole = 0, *o = out + r * s->E;
        const float *channel = vs->channel ? vs->channel + r % Q / s->G * vs->channel_head : 0;
        for (long p = r; p < splits * rows; p += rows)
            top = highest[p] > top ? highest[p] : top;
        memset(o, 0, s->E * sizeof *o);
        for (long p = r; p < splits * rows; p += rows) {
            float weight = highest[p] == -INFINITY ? 0 : exp2f(highest[p] - top);
            whole += weight * total[p];
            for (long e = 0; e < s->E; e++)
                o[e] += weight * acc[p * s->E + e];
        }
        float part = whole > 0 ? gain(s->kind_v) / whole : 0;
        for (long e = 0; e < s->E; e++)
            o[e] *= part * (channel ? channel[e] : 1.0f);
        if (lse)
            lse[r] = whole > 0 ? (top + log2f(whole)) * 0.69314718f : -INFINITY;
    }
    return (int)bad;
}
