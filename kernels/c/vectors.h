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

enum { F32, BF16, F16 }; /* types of elements */

#define INLINE static inline __attribute__((always_inline))

INLINE vf all(float x) { return x - (vf){0}; }

#endif
