/* Stored codes as vectors of floats, and what attention does to such vectors. L lanes, as many as the machine has. */
#ifdef __F16C__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define L 16
#elif defined(__AVX__)
#define L 8
#else
#define L 4
#endif
#define LINE 64                 /* bytes of a cache line */

typedef float vf __attribute__((vector_size(4 * L), aligned(4), may_alias));
typedef int vi __attribute__((vector_size(4 * L), aligned(4), may_alias));
typedef unsigned vu __attribute__((vector_size(4 * L), aligned(4), may_alias));
typedef unsigned short vh __attribute__((vector_size(2 * L), aligned(1), may_alias));
typedef short vs __attribute__((vector_size(2 * L), aligned(1), may_alias));
typedef unsigned char vb __attribute__((vector_size(L), aligned(1), may_alias));
typedef signed char vc __attribute__((vector_size(L), aligned(1), may_alias));

enum { FP32, FP16, BF16, E4M3, E5M2, INT8 };

static const int BYTES[] = {4, 2, 2, 1, 1, 1};

static inline vf half(vh h)
{
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)h);
#else
    vu bits = __builtin_convertvector(h, vu), size = (bits & 0x7fff) << 13;
    vu special = (vu)(size >= (0x7c00u << 13));
    vu value = (vu)((vf)size * 0x1p112f);
    return (vf)(((special & (size | 0x7f800000)) | (~special & value)) | ((bits & 0x8000) << 16));
#endif
}

/* L stored codes as floats. E4M3 comes out 256 times too small, which `gain` makes up for. */
static inline __attribute__((always_inline)) vf load(int kind, const char *p)
{
    switch (kind) {
    case FP32: return *(const vf *)p;
    case FP16: return half(*(const vh *)p);
    case BF16: return (vf)(__builtin_convertvector(*(const vh *)p, vu) << 16);
    case INT8: return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(*(const vc *)p, vs), vi), vf);
    default: {
        vh code = __builtin_convertvector(*(const vb *)p, vh);
        if (kind == E5M2)
            return half(code << 8);
        return half(((code & 0x7f) << 7) | ((code & 0x80) << 8));
    }
    }
}

static inline float gain(int kind) { return kind == E4M3 ? 256.0f : 1.0f; }

/* One code, for the channels that fill no vector. */
static float load_one(int kind, const char *p)
{
    char padded[4 * L] = {0};
    memcpy(padded, p, BYTES[kind]);
    return load(kind, padded)[0];
}

static inline float sum(vf x)
{
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < L; i++)
        total += x[i];
    return total;
#endif
}

static inline vf either(vi which, vf a, vf b) { return (vf)((which & (vi)a) | (~which & (vi)b)); }

/* 2^x for x <= 0. */
static inline vf power(vf x)
{
    x = either(x < -126.0f, (vf){0} - 126.0f, x);
    vi whole = __builtin_convertvector(x - 0.5f, vi);           /* to the nearest, since x <= 0 */
    vf rest = x - __builtin_convertvector(whole, vf);
    vf value = 1.540353e-4f * rest + 1.3333558e-3f;
    value = value * rest + 9.6181291e-3f;
    value = value * rest + 5.5504109e-2f;
    value = value * rest + 2.4022651e-1f;
    value = value * rest + 6.9314718e-1f;
    value = value * rest + 1.0f;
    return (vf)((vi)value + (whole << 23));
}

