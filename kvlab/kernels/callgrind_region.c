/* What a cache simulator is shown: one call that begins with a last-level cache full of other, unchanged data. What the
   call left there to be written back is driven out afterwards and counted apart. Built twice: as a library that Python
   loads, and with -DMAIN as a program that runs the kernels of c_attention.c, or a copy, a read, a matrix product. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <valgrind/callgrind.h>

static volatile float *other;
static long others;

static void fill_cache(void) {
    for (long i = 0; i < others; i += 64 / sizeof(float)) (void)other[i];
}

int under_valgrind(void) { return RUNNING_ON_VALGRIND != 0; }

/* 0, or 1 where memory is short. */
int region_begin(long cache_bytes) {
    if (!other) {
        others = 4 * cache_bytes / sizeof(float);
        if (!(other = malloc(others * sizeof(float)))) return 1;
        for (long i = 0; i < others; i++) other[i] = 1;
    }
    CALLGRIND_START_INSTRUMENTATION;
    fill_cache();
    CALLGRIND_ZERO_STATS;
    return 0;
}

void region_end(const char *call, const char *left) {
    CALLGRIND_DUMP_STATS_AT(call);
    fill_cache();
    CALLGRIND_DUMP_STATS_AT(left);
    CALLGRIND_STOP_INSTRUMENTATION;
}

#ifdef MAIN
#include "c_attention.c"

static float *numbers(long n) {
    float *made = aligned_alloc(64, (n * sizeof(float) + 63) / 64 * 64);
    if (!made) exit(3);
    for (long i = 0; i < n; i++) made[i] = (float)((i * 2654435761u) % 1000) / 1000 - 0.5f;
    return made;
}

__attribute__((noinline)) static void copy(const float *from, float *to, long n) {
    for (long i = 0; i < n; i++) to[i] = from[i];
}

__attribute__((noinline)) static float total(const float *x, long n) {
    float sum = 0;
    for (long i = 0; i < n; i++) sum += x[i];
    return sum;
}

/* out = a · b, some rows at a time: b is read once for each of these blocks, a and out once. */
__attribute__((noinline)) static void matmul(const float *a, const float *b, float *out, long n, long rows) {
    for (long first = 0; first < n; first += rows) {
        const long end = least(first + rows, n);
        zero(out + first * n, (end - first) * n);
        for (long i = 0; i < n; i++)
            for (long row = first; row < end; row++) add(out + row * n, a[row * n + i], b + i * n, n);
    }
}

/* program copy|read CACHE_BYTES N, program matmul CACHE_BYTES SIDE ROWS, or program c_… CACHE_BYTES V_IN_K and then a
   Shape for each sequence. */
int main(int argc, char **argv) {
    const char *what = argv[1];
    const long cache_bytes = atol(argv[2]), last = atol(argv[3]);
    const int matrix = !strcmp(what, "matmul");
    if (strncmp(what, "c_", 2)) {
        const long n = matrix ? last * last : last;
        float *a = numbers(n), *b = numbers(n), *out = numbers(matrix ? n : 1);
        if (region_begin(cache_bytes)) return 3;
        if (matrix) matmul(a, b, out, last, atol(argv[4]));
        else if (!strcmp(what, "copy")) copy(a, b, n);
        else out[0] = total(a, n);
        region_end("call", "left");
        return out[0] == 42;
    }
    const int fields = sizeof(Shape) / sizeof(long), sequences = (argc - 4) / fields;
    Shape *shape = malloc(sequences * sizeof(Shape));
    float *(*given)[4] = malloc(sequences * sizeof(*given)), *space;
    long needed = 1;
    for (int b = 0; b < sequences; b++) {
        for (int i = 0; i < fields; i++) ((long *)&shape[b])[i] = atol(argv[4 + b * fields + i]);
        const Shape *s = &shape[b];
        given[b][0] = numbers(s->T * s->Q * s->D);
        given[b][1] = numbers(s->K * s->k_head);
        given[b][2] = last ? given[b][1] : numbers(s->K * s->v_head);
        given[b][3] = numbers(s->T * s->Q * s->E);
        needed = most(needed, most(c_naive_space(s) * !strcmp(what, "c_naive"),
                                   most(c_flash_space(s), c_decode_space(s))));
    }
    space = numbers(needed);
    void (*kernel)(const Shape *, const float *, const float *, const float *, float *, float *) =
        !strcmp(what, "c_naive") ? c_naive : !strcmp(what, "c_flash") ? c_flash : c_decode;
    if (region_begin(cache_bytes)) return 3;
    for (int b = 0; b < sequences; b++)
        kernel(&shape[b], given[b][0], given[b][1], given[b][2], given[b][3], space);
    region_end("call", "left");
    float sum = 0;
    for (int b = 0; b < sequences; b++) sum += total(given[b][3], shape[b].T * shape[b].Q * shape[b].E);
    return sum == 42;
}
#endif
