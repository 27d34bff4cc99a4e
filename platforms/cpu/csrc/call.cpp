#include "call.h"

#include <limits>

namespace attn_cpu {
namespace {

KvView kv_view(const Tensor& t, bool paged) {
  const int64_t size = static_cast<int64_t>(t.element_size());
  KvView v;
  v.data = static_cast<char*>(t.data_ptr());
  v.block = paged ? t.stride(0) * size : 0;
  v.slot = t.stride(paged ? 1 : 0) * size;
  v.head = t.stride(paged ? 2 : 1) * size;
  return v;
}

ScaleView scale_view(const char* name, const OptTensor& t, const Tensor& cache, bool needed) {
  if (!needed) {
    require(!t, name, "a tensor", "None, unless the cache is int8");
    return ScaleView{nullptr, 0, 0, 0};
  }
  require(t.has_value(), name, "None", "float32 (num_blocks, block_size, Hkv) with an int8 cache");
  require_tensor(name, *t, {cache.size(0), cache.size(1), cache.size(2)}, false);
  require_dtype(name, *t, ScalarType::Float);
  return ScaleView{static_cast<float*>(t->data_ptr()), t->stride(0), t->stride(1), t->stride(2)};
}

void set_rows(Call& c, const AttentionTensors& t, const PlanHeader& plan) {
  const int64_t tokens = t.query.dim() == 3 ? t.query.size(0) : 0;
  require_tensor("query", t.query, {-1, plan.num_heads, plan.head_size});
  require_tensor("out", t.out, {-1, plan.num_heads, plan.head_size_v});
  c.dtype = compute_dtype("query", t.query);
  require_dtype("out", t.out, t.query.scalar_type());
  require_writable("out", t.out);
  require(tokens >= plan.num_tokens, "query rows", tokens, Words{"at least ", plan.num_tokens});
  require(t.out.size(0) >= plan.num_tokens, "out rows", t.out.size(0), Words{"at least ", plan.num_tokens});
  c.query = static_cast<const char*>(t.query.data_ptr());
  c.query_token = t.query.stride(0);
  c.query_head = t.query.stride(1);
  c.out = static_cast<char*>(t.out.data_ptr());
  c.out_token = t.out.stride(0);
  c.out_head = t.out.stride(1);
  if (!t.lse) return;
  require_tensor("lse", *t.lse, {plan.num_heads, -1}, false);
  require_dtype("lse", *t.lse, ScalarType::Float);
  require_writable("lse", *t.lse);
  require(t.lse->size(1) >= plan.num_tokens, "lse columns", t.lse->size(1), Words{"at least ", plan.num_tokens});
  c.lse = static_cast<float*>(t.lse->data_ptr());
  c.lse_head = t.lse->stride(0);
  c.lse_token = t.lse->stride(1);
}

void set_keys(Call& c, const AttentionTensors& t, const PlanHeader& plan) {
  const bool paged = t.block_table.has_value();
  if (paged) {
    require_tensor("key", t.key, {-1, -1, plan.num_kv_heads, plan.head_size});
    require_tensor("value", t.value, {t.key.size(0), t.key.size(1), plan.num_kv_heads, plan.head_size_v});
    require(t.key.size(1) >= 1, "block_size", t.key.size(1), "at least 1");
  } else {
    require_tensor("key", t.key, {-1, plan.num_kv_heads, plan.head_size});
    require_tensor("value", t.value, {t.key.size(0), plan.num_kv_heads, plan.head_size_v});
  }
  c.kv_dtype = stored_dtype("key", t.key);
  require_dtype("value", t.value, t.key.scalar_type());
  const bool quantized = c.kv_dtype == DType::kE4M3 || c.kv_dtype == DType::kE5M2 || c.kv_dtype == DType::kInt8;
  if (!quantized && c.kv_dtype != c.dtype)
    refuse("key dtype", dtype_name(t.key.scalar_type()),
           std::string(dtype_name(t.query.scalar_type())) + ", query's, or a quantised cache");
  require(!quantized || paged, "key dtype", dtype_name(t.key.scalar_type()), "query's dtype where there is no block_table");
  c.key = kv_view(t.key, paged);
  c.value = kv_view(t.value, paged);
  c.block_size = paged ? t.key.size(1) : std::numeric_limits<int32_t>::max();
  c.key_scales = scale_view("key_scales", t.key_scales, t.key, c.kv_dtype == DType::kInt8);
  c.value_scales = scale_view("value_scales", t.value_scales, t.value, c.kv_dtype == DType::kInt8);
  const bool fp8 = quantized && c.kv_dtype != DType::kInt8;
  require(fp8 || !t.k_scale, "k_scale", "a tensor", "None, unless the cache is fp8");
  require(fp8 || !t.v_scale, "v_scale", "a tensor", "None, unless the cache is fp8");
  c.k_scale = scales_of("k_scale", t.k_scale, plan.num_kv_heads, &c.k_scale_step);
  c.v_scale = scales_of("v_scale", t.v_scale, plan.num_kv_heads, &c.v_scale_step);
}

const int32_t* integers(const char* name, const Tensor& t, int64_t size) {
  require_tensor(name, t, {size});
  require_dtype(name, t, ScalarType::Int);
  return static_cast<const int32_t*>(t.data_ptr());
}

void set_batch(Call& c, const AttentionTensors& t, const PlanHeader& plan) {
  c.num_reqs = plan.num_reqs;
  c.query_start = integers("query_start_loc", t.query_start_loc, int64_t{plan.num_reqs} + 1);
  c.seq_lens = integers("seq_lens", t.seq_lens, plan.num_reqs);
  if (t.block_table) {
    require(!t.key_start_loc, "key_start_loc", "a tensor", "None with a block_table");
    require_tensor("block_table", *t.block_table, {-1, -1});
    require_dtype("block_table", *t.block_table, ScalarType::Int);
    require(t.block_table->size(0) >= plan.num_reqs, "block_table rows", t.block_table->size(0),
            Words{"at least one per request, ", plan.num_reqs});
    c.table = static_cast<const int32_t*>(t.block_table->data_ptr());
    c.table_row = t.block_table->stride(0);
    // A table without entries has no memory either; kernels tell paged calls by the pointer.
    static const int32_t no_entry = 0;
    if (!c.table) c.table = &no_entry;
  } else {
    require(t.key_start_loc.has_value(), "key_start_loc", "None", "int32 (B + 1) where there is no block_table");
    c.key_start = integers("key_start_loc", *t.key_start_loc, int64_t{plan.num_reqs} + 1);
  }
  if (t.causal_per_request) {
    require_tensor("causal_per_request", *t.causal_per_request, {plan.num_reqs});
    require_dtype("causal_per_request", *t.causal_per_request, ScalarType::Bool);
    c.causal_of = static_cast<const bool*>(t.causal_per_request->data_ptr());
  }
  if (!t.mm_prefix_ranges) return;
  require_tensor("mm_prefix_ranges", *t.mm_prefix_ranges, {-1, 3});
  require_dtype("mm_prefix_ranges", *t.mm_prefix_ranges, ScalarType::Int);
  const int64_t n = t.mm_prefix_ranges->size(0);
  require(n <= 1 || t.mm_prefix_ranges->stride(0) == 3, "mm_prefix_ranges strides", strides_of(*t.mm_prefix_ranges), "(3, 1)");
  c.ranges = static_cast<const int32_t*>(t.mm_prefix_ranges->data_ptr());
  c.num_ranges = static_cast<int>(n);
}

}  // namespace

Call call_of(const AttentionTensors& t, const PlanHeader& plan) {
  Call c = {};
  c.num_heads = plan.num_heads;
  c.num_kv_heads = plan.num_kv_heads;
  c.group = plan.num_heads / plan.num_kv_heads;
  c.head_size = plan.head_size;
  c.head_size_v = plan.head_size_v;
  set_rows(c, t, plan);
  set_keys(c, t, plan);
  set_batch(c, t, plan);
  c.sinks = per_head("sinks", t.sinks, plan.num_heads);
  c.alibi = per_head("alibi_slopes", t.alibi_slopes, plan.num_heads);
  check_lengths(c, t);
  require(c.query_start[c.num_reqs] == plan.num_tokens, "query_start_loc[-1]", c.query_start[c.num_reqs],
          Words{"", plan.num_tokens, ", what the plan was made for"});
  check_table(c, t);
  return c;
}

void check_lengths(const Call& c, const AttentionTensors& t) {
  const int64_t blocks = c.table ? t.block_table->size(1) : 0, keys = t.key.size(0);
  require(c.query_start[0] >= 0, "query_start_loc[0]", c.query_start[0], ">= 0");
  for (int b = 0; b < c.num_reqs; b++) {
    const int64_t len = c.seq_lens[b];
    require(c.query_start[b] <= c.query_start[b + 1], "query_start_loc", c.query_start[b + 1], "offsets that never fall");
    require(len >= 0, "seq_lens", len, ">= 0");
    if (c.table) {
      require(len <= blocks * c.block_size, "seq_lens", len,
              Words{"at most ", blocks * c.block_size, ", what a row of block_table holds"});
    } else if (len > 0) {
      const int64_t start = c.key_start[b];
      require(start >= 0 && start + len <= keys, "key_start_loc + seq_lens", start + len,
              Words{"at most ", keys, ", the rows of key"});
    }
  }
  require(c.query_start[c.num_reqs] <= t.query.size(0), "query_start_loc[-1]", c.query_start[c.num_reqs],
          Words{"at most the rows of query, ", t.query.size(0)});
}

void check_table(const Call& c, const AttentionTensors& t) {
  const int64_t num_blocks = t.key.size(0);
  for (int b = 0; c.table && b < c.num_reqs; b++)
    for (int64_t i = 0; i * c.block_size < c.seq_lens[b]; i++) {
      const int32_t block = c.table[b * c.table_row + i];
      if (block < 0 || block >= num_blocks)
        refuse(("block_table[" + std::to_string(b) + ", " + std::to_string(i) + "]").c_str(), block,
               "0 to " + std::to_string(num_blocks - 1));
    }
}

void check_contents(const Call& c) {
  for (int i = 0; i < c.num_ranges; i++) {
    const int32_t* r = c.ranges + 3 * i;
    const bool ok = r[0] >= 0 && r[0] < c.num_reqs && r[1] >= 0 && r[1] <= r[2];
    require(ok, "mm_prefix_ranges", i, "rows (request, start, end) with 0 <= start <= end");
  }
}

}  // namespace attn_cpu
