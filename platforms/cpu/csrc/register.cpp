#include <torch/csrc/stable/library.h>

#include "attention_op.h"
#include "isa.h"
#include "ops.h"
#include "other_ops.h"
#include "plan.h"

namespace attn_cpu {
namespace {

int64_t features_op() { return static_cast<int64_t>(cpu_features()); }
int64_t built_op() { return static_cast<int64_t>(isa_built()); }
int64_t supported_op(int64_t features) { return static_cast<int64_t>(isa_supported(static_cast<uint64_t>(features))); }
bool permission_op() { return amx_permission(); }

Tensor plan_boxed(Tensor query_start_loc, Tensor seq_lens, int64_t num_heads, int64_t num_kv_heads, int64_t head_size,
                  int64_t head_size_v, bool causal, OptTensor causal_per_request, std::optional<int64_t> window_left,
                  std::optional<int64_t> window_right, std::optional<int64_t> chunk_size, bool has_mm_prefix,
                  int64_t num_threads, bool batch_invariant) {
  return plan_op(query_start_loc, seq_lens, num_heads, num_kv_heads, head_size, head_size_v, causal,
                 causal_per_request, window_left, window_right, chunk_size, has_mm_prefix, num_threads,
                 batch_invariant);
}
int64_t workspace_boxed(Tensor plan) { return workspace_bytes_op(plan); }

}  // namespace
}  // namespace attn_cpu

STABLE_TORCH_LIBRARY(attn_cpu, m) {
  for (const char* schema : {attn_cpu::kAttention, attn_cpu::kAttentionCached, attn_cpu::kWriteAndAttend,
                             attn_cpu::kPlan, attn_cpu::kWorkspaceBytes, attn_cpu::kWriteKv, attn_cpu::kMerge,
                             attn_cpu::kCpuFeatures, attn_cpu::kIsaBuilt, attn_cpu::kIsaSupported,
                             attn_cpu::kAmxPermission})
    m.def(schema);
}

STABLE_TORCH_LIBRARY_IMPL(attn_cpu, CPU, m) {
  m.impl("attention", TORCH_BOX(&attn_cpu::attention_op));
  m.impl("attention_cached", TORCH_BOX(&attn_cpu::attention_cached_op));
  m.impl("write_and_attend", TORCH_BOX(&attn_cpu::write_and_attend_op));
  m.impl("plan", TORCH_BOX(&attn_cpu::plan_boxed));
  m.impl("workspace_bytes", TORCH_BOX(&attn_cpu::workspace_boxed));
  m.impl("write_kv", TORCH_BOX(&attn_cpu::write_kv_op));
  m.impl("merge_attn_states", TORCH_BOX(&attn_cpu::merge_op));
}

// Ops without a tensor have no device to be dispatched by.
STABLE_TORCH_LIBRARY_IMPL(attn_cpu, CompositeExplicitAutograd, m) {
  m.impl("cpu_features", TORCH_BOX(&attn_cpu::features_op));
  m.impl("isa_built", TORCH_BOX(&attn_cpu::built_op));
  m.impl("isa_supported", TORCH_BOX(&attn_cpu::supported_op));
  m.impl("amx_permission", TORCH_BOX(&attn_cpu::permission_op));
}
