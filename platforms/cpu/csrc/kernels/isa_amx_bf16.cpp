// The kernels of level amx_bf16.
#include <immintrin.h>
#include <cmath>
#include <cstring>

#include "table.h"

#define ATTN_BYTE_TABLE

// Headers below are compiled into this namespace, once per level, so that no inline function of one level can
// stand in for another's.
namespace attn_cpu::amx_bf16 {

#include "scalar.h"
#include "vec_avx512.h"
#include "bytes.h"
#include "common.h"
#include "tile.h"
#include "packed.h"
#include "write.h"
#include "amx_common.h"
#include "amx_decode.h"
#include "amx_prefill.h"

static size_t scratch_bytes(int head_size, int head_size_v) {
  const size_t few = float_bytes(head_size, head_size_v), decode = decode_bytes(head_size, head_size_v);
  return imax(imax(few, decode), prefill_bytes(head_size, head_size_v));
}

static void attend(const Call& c, const Item& it, char* scratch) {
  // Tiles multiply bfloat16, which also holds every byte format exactly; the rest is computed in float32.
  if (c.dtype != DType::kBFloat16) return attend_float(c, it, scratch);
  if (request_rows(c, it) <= 16) return attend_decode(c, it, scratch);
  attend_prefill(c, it, scratch);
}

extern const Kernels kKernels;
const Kernels kKernels = {scratch_bytes, attend, merge_rows, write_slots};

}  // namespace attn_cpu::amx_bf16
