/* Vectors that the compiler has for this processor: those of GCC and clang, in plain C. */

#ifndef PAGEDKV_VECTORS_H
#define PAGEDKV_VECTORS_H

#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h> /* compilers take halves one by one */
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef float vfu __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t viu __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint16_t vhu __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

enum { F32, BF16, F16 }; /* types of elements */

#define INLINE static inline __attribute__((always_inline))

INLINE vf all(float x) { return x - (vf){0}; }
INLINE vf choose(vi which, vf yes, vf no) { return (vf)((which & (vi)yes) | (~which & (vi)no)); }

/* Floats of halves. No float on the way is subnormal, because a process may treat those as zeros. */
INLINE vf of_halves(const void *at) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(at));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(at));
#else
    vi bits = __builtin_convertvector(*(const vhu *)at, vi), rest = (bits & 0x7fff) << 13;
    vi bias = 113 << 23 | (vi){0};
    vf subnormal = (vf)(rest + bias) - (vf)bias;
    vi finite = (vi)choose(rest < 0x00800000, subnormal, (vf)(rest + (112 << 23)));
    return (vf)(finite | ((rest >= 0x0f800000) & 0x7f800000) | (bits & 0x8000) << 16);
#endif
}

/* As many numbers as two vectors have lanes. A word of bfloat16 has one of the first and one of the second. */
INLINE void widen_two(const char *at, int type, vf *first, vf *second) {
    if (type == F32) {
        *first = *(const vfu *)at;
        *second = *(const vfu *)(at + 4 * LANES);
    } else if (type == BF16) {
        vi words = *(const viu *)at;
        *first = (vf)(words << 16);
        *second = (vf)(words & -0x10000);
    } else {
        *first = of_halves(at);
        *second = of_halves(at + 2 * LANES);
    }
}

#endif
