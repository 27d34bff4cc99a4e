#pragma once
#include "check.h"

namespace attn_cpu {

// The rows to be written and the slots they go to, checked against each other and against a cache of `limit` slots; the
// record's cache is the caller's to fill in.
WriteCall new_rows(const Tensor& key, const Tensor& value, const Tensor& slot_mapping, int64_t limit, bool checked);
void write_rows(const WriteCall& w);

void write_kv_op(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping, OptTensor k_scale,
                 OptTensor v_scale, OptTensor key_scales, OptTensor value_scales, bool checked);
void merge_op(Tensor output, OptTensor output_lse, Tensor output_a, Tensor lse_a, Tensor output_b, Tensor lse_b);

}  // namespace attn_cpu
