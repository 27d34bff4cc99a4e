#pragma once
#include "check.h"

namespace attn_cpu {

// The arguments of attn_cpu::attention (ops.h) that are not scalars.
struct AttentionTensors {
  const Tensor &query, &out;
  const OptTensor& lse;
  const Tensor &key, &value;
  const OptTensor& block_table;
  const Tensor &query_start_loc, &seq_lens;
  const OptTensor& key_start_loc;
  const Tensor& plan;
  const OptTensor &workspace, &causal_per_request, &sinks, &alibi_slopes, &k_scale, &v_scale, &key_scales, &value_scales,
      &mm_prefix_ranges;
};

// The arguments of attn_cpu::attention_cached.
struct CachedTensors {
  const Tensor &query, &out;
  const OptTensor &new_key, &new_value;
  const Tensor &kv_cache, &block_table, &plan, &layer;
};

// What a layer tells attn_cpu::attention_cached: its tensor `layer`, in this order. Dtypes are numbers of DType.
struct LayerRecord {
  double scale, softcap, k_scale, v_scale;  // softcap 0: off
  double dtype, kv_dtype, block_size, num_heads, num_kv_heads, head_size;
};

void attention_cached_op(Tensor query, Tensor out, OptTensor new_key, OptTensor new_value, Tensor kv_cache,
                         Tensor block_table, Tensor plan, OptTensor workspace, Tensor layer, int64_t isa);

void write_and_attend_op(Tensor query, Tensor out, Tensor key, Tensor value, Tensor kv_cache, Tensor slot_mapping,
                         Tensor block_table, Tensor plan, OptTensor workspace, Tensor layer, int64_t isa);

void attention_op(Tensor query, Tensor out, OptTensor lse, Tensor key, Tensor value, OptTensor block_table,
                  Tensor query_start_loc, Tensor seq_lens, OptTensor key_start_loc, Tensor plan, OptTensor workspace,
                  double scale, std::optional<double> softcap, std::optional<int64_t> window_left,
                  std::optional<int64_t> window_right, std::optional<int64_t> chunk_size, bool causal,
                  OptTensor causal_per_request, OptTensor sinks, OptTensor alibi_slopes, OptTensor k_scale,
                  OptTensor v_scale, OptTensor key_scales, OptTensor value_scales, OptTensor mm_prefix_ranges,
                  bool checked, int64_t isa);

}  // namespace attn_cpu
