/* Vectors of this processor, through the extensions of GCC and clang, in plain C. */

#ifndef PAGEDKV_VECTORS_H
#define PAGEDKV_VECTORS_H

#include <stdint.h>
#include <string.h>
#if defined(__F16C__) || defined(__FMA__)
#include <immintrin.h> /* by themselves compilers convert halves singly, and fuse some products */
#elif defined(__aarch64__)
#include <arm_neon.h>
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
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint16_t vhu __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

enum { F32, BF16, F16 }; /* types of elements */

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t size_of(int type) { return type == F32 ? 4 : 2; }

INLINE vf all(float x) { return x - (vf){0}; }
INLINE vf choose(vi which, vf yes, vf no) { return (vf)((which & (vi)yes) | (~which & (vi)no)); }

/* Converts halves to floats. No intermediate float is subnormal: processes may treat these as 0. */
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

/* Converts floats that halves hold exactly; the result for other floats is undefined. */
INLINE vhu to_halves(vf x) {
    vi bits = (vi)x, rest = bits & 0x7fffffff;
    vi subnormal = (vi)((vf)rest + all(0.5f)) - 0x3f000000, special = 0x7c00 | (rest >> 13 & 0x3ff);
    vi finite = (vi)choose(rest < 0x38800000, (vf)subnormal, (vf)((rest >> 13) - (112 << 10)));
    vi half = (vi)choose(rest >= 0x7f800000, (vf)special, (vf)finite);
    return __builtin_convertvector(half | (bits >> 16 & 0x8000), vh);
}

/* Rounds to the nearest bfloat16, ties to even. */
INLINE vf to_bfloats(vf x) {
    vi bits = (vi)x, up = (bits + 0x7fff + (bits >> 16 & 1)) & -0x10000;
    return choose(x == x, (vf)up, (vf)((bits | 0x400000) & -0x10000));
}

/* Widens the numbers of two vectors. In bfloat16 a word has one number of each vector. */
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

/* x * y + z, rounded once if the processor can. All other products and sums are rounded separately:
   a compiler that may choose fuses one loop and not another, and their bits would differ. */
INLINE vf fused(vf x, vf y, vf z) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
    return x * y + z;
#endif
}

#define FOUR(i, odd) 2 * (i) + odd, 2 * (i) + 2 + odd, 2 * (i) + 4 + odd, 2 * (i) + 6 + odd
#define EIGHT(i, odd) FOUR(i, odd), FOUR(i + 4, odd)
#if LANES == 16
#define EACH(odd) EIGHT(0, odd), EIGHT(8, odd)
#elif LANES == 8
#define EACH(odd) EIGHT(0, odd)
#else
#define EACH(odd) FOUR(0, odd)
#endif
#ifdef __clang__ /* every other lane of two vectors, one behind the other */
#define PICK(x, y, odd) __builtin_shufflevector(x, y, EACH(odd))
#else
#define PICK(x, y, odd) __builtin_shuffle(x, y, (vi){EACH(odd)})
#endif

/* Transposes LANES vectors in place. The bits of a vector's index and of a lane's make a number's
   place. Each round rotates these bits by one, so after log2(LANES) rounds vector and lane have
   changed places. */
INLINE void transpose(vf *x) {
    vf y[LANES];
    for (int round = 1; round < LANES; round *= 2) {
        for (int i = 0; i < LANES / 2; i++) {
            y[i] = PICK(x[2 * i], x[2 * i + 1], 0);
            y[i + LANES / 2] = PICK(x[2 * i], x[2 * i + 1], 1);
        }
        for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
}

/* Whether a condition holds in any lane. */
INLINE int any(vi which) {
    uint64_t parts[LANES / 2], found = 0;
    memcpy(parts, &which, sizeof which);
    for (int i = 0; i < LANES / 2; i++) found |= parts[i];
    return found != 0;
}

#endif
