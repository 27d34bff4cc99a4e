// The kernels of level avx2.
#include <immintrin.h>
#include <cmath>
#include <cstring>

#include "table.h"

// Headers below are compiled into this namespace, once per level, so that no inline function of one level can
// stand in for another's.

namespace attn_cpu::avx2 {

#include "scalar.h"
#include "vec_avx2.h"
#include "common.h"
#include "tile.h"
#include "packed.h"
#include "write.h"

extern const Kernels kKernels;
const Kernels kKernels = {float_bytes, attend_float, merge_rows, write_slots};

}  // namespace attn_cpu::avx2
