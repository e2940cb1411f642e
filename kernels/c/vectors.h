/* Vectors that the compiler has for this processor: those of GCC and clang, in plain C. */

#ifndef PAGEDKV_VECTORS_H
#define PAGEDKV_VECTORS_H

#include <stdint.h>
#include <string.h>
#if defined(__F16C__) || defined(__FMA__)
#include <immintrin.h> /* compilers take halves one by one, and fuse what they like */
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

enum { F32, BF16, F16 }; /* types of elements */

#define INLINE static inline __attribute__((always_inline))

INLINE vf all(float x) { return x - (vf){0}; }

/* x * y + z, rounded once where the processor can. What is not written so is rounded twice: a compiler
   that may choose fuses one loop and not another, and then two loops have other bits. */
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

#endif
