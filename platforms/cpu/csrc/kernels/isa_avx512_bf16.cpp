// The kernels of level avx512_bf16: those of avx512, with products of pairs of bfloat16.
#include <immintrin.h>
#include <cmath>
#include <cstring>

#include "table.h"

#define ATTN_WORD_DOT

// Headers below are compiled into this namespace, once per level, so that no inline function of one level can
// stand in for another's.
namespace attn_cpu::avx512_bf16 {

#include "scalar.h"
#include "vec_avx512.h"

// sum += 32 products, added in pairs.
static inline vf vdot_words(const char* a, const char* b, vf sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(b));
}

#include "common.h"
#include "tile.h"
#include "packed.h"
#include "write.h"

extern const Kernels kKernels;
const Kernels kKernels = {float_bytes, attend_float, merge_rows, write_slots};

}  // namespace attn_cpu::avx512_bf16
