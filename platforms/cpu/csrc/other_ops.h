#pragma once
#include "check.h"

namespace attn_cpu {

void write_kv_op(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping, OptTensor k_scale,
                 OptTensor v_scale, OptTensor key_scales, OptTensor value_scales, bool checked);
void merge_op(Tensor output, OptTensor output_lse, Tensor output_a, Tensor lse_a, Tensor output_b, Tensor lse_b);

}  // namespace attn_cpu
