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

void set_sizes(Call& c, const PlanHeader& plan) {
  c.num_reqs = plan.num_reqs;
  c.num_heads = plan.num_heads;
  c.num_kv_heads = plan.num_kv_heads;
  c.group = plan.num_heads / plan.num_kv_heads;
  c.head_size = plan.head_size;
  c.head_size_v = plan.head_size_v;
}

void set_rows(Call& c, const Tensor& query, const Tensor& out, const PlanHeader& plan) {
  require_tensor("query", query, {-1, plan.num_heads, plan.head_size});
  require_tensor("out", out, {-1, plan.num_heads, plan.head_size_v});
  c.dtype = compute_dtype("query", query);
  require_dtype("out", out, query.scalar_type());
  require_writable("out", out);
  require(query.size(0) >= plan.num_tokens, "query rows", query.size(0), Words{"at least ", plan.num_tokens});
  require(out.size(0) >= plan.num_tokens, "out rows", out.size(0), Words{"at least ", plan.num_tokens});
  c.query = static_cast<const char*>(query.data_ptr());
  c.query_token = query.stride(0);
  c.query_head = query.stride(1);
  c.out = static_cast<char*>(out.data_ptr());
  c.out_token = out.stride(0);
  c.out_head = out.stride(1);
}

void set_lse(Call& c, const OptTensor& lse, const PlanHeader& plan) {
  if (!lse) return;
  require_tensor("lse", *lse, {plan.num_heads, -1}, false);
  require_dtype("lse", *lse, ScalarType::Float);
  require_writable("lse", *lse);
  require(lse->size(1) >= plan.num_tokens, "lse columns", lse->size(1), Words{"at least ", plan.num_tokens});
  c.lse = static_cast<float*>(lse->data_ptr());
  c.lse_head = lse->stride(0);
  c.lse_token = lse->stride(1);
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

void set_table(Call& c, const Tensor& table) {
  require_tensor("block_table", table, {-1, -1});
  require_dtype("block_table", table, ScalarType::Int);
  require(table.size(0) >= c.num_reqs, "block_table rows", table.size(0),
          Words{"at least one per request, ", c.num_reqs});
  c.table = static_cast<const int32_t*>(table.data_ptr());
  c.table_row = table.stride(0);
  // A table without entries has no memory either; kernels tell paged calls by the pointer.
  static const int32_t no_entry = 0;
  if (!c.table) c.table = &no_entry;
}

void set_batch(Call& c, const AttentionTensors& t, const PlanHeader& plan) {
  c.query_start = integers("query_start_loc", t.query_start_loc, int64_t{plan.num_reqs} + 1);
  c.seq_lens = integers("seq_lens", t.seq_lens, plan.num_reqs);
  if (t.block_table) {
    require(!t.key_start_loc, "key_start_loc", "a tensor", "None with a block_table");
    set_table(c, *t.block_table);
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

// Lengths, offsets and the width of the table against each other: what a kernel would otherwise read past. `blocks` are
// entries of a row of the table, `keys` rows of keys that come with the call.
void check_lengths(const Call& c, int64_t blocks, int64_t keys) {
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
}

// Table entries that are read: one comparison per block beside the reading of that block, and never a stray read.
void check_table(const Call& c, int64_t num_blocks) {
  for (int b = 0; c.table && b < c.num_reqs; b++)
    for (int64_t i = 0; i * c.block_size < c.seq_lens[b]; i++) {
      const int32_t block = c.table[b * c.table_row + i];
      if (block < 0 || block >= num_blocks)
        refuse(("block_table[" + std::to_string(b) + ", " + std::to_string(i) + "]").c_str(), block,
               "0 to " + std::to_string(num_blocks - 1));
    }
}

// The plan was made for these offsets: rows of query and out were counted by it.
void check_tokens(const Call& c, const PlanHeader& plan) {
  require(c.query_start[c.num_reqs] == plan.num_tokens, "query_start_loc[-1]", c.query_start[c.num_reqs],
          Words{"", plan.num_tokens, ", what the plan was made for"});
}

// What a step has written: of the layer's heads and dtype, or not there at all.
void check_written(const char* name, const OptTensor& t, const OptTensor& other, const Tensor& query, const Call& c) {
  require(t.has_value() == other.has_value(), name, t ? "a tensor" : "None", "a tensor where the other is one");
  if (!t) return;
  require_tensor(name, *t, {-1, c.num_kv_heads, c.head_size}, false);
  require_dtype(name, *t, query.scalar_type());
}

// A number of a layer's record, which may hold anything.
int64_t whole(double x) { return x >= 0 && x < 1e15 ? static_cast<int64_t>(x) : -1; }

void check_sizes(const Call& c, const LayerRecord& layer) {
  const struct {
    const char* name;
    int64_t value;
    double wanted;
  } sizes[] = {{"plan num_heads", c.num_heads, layer.num_heads},
               {"plan num_kv_heads", c.num_kv_heads, layer.num_kv_heads},
               {"plan head_size", c.head_size, layer.head_size},
               {"plan head_size_v", c.head_size_v, layer.head_size},
               {"kv_cache block size", c.block_size, layer.block_size}};
  for (const auto& size : sizes)
    require(static_cast<double>(size.value) == size.wanted, size.name, size.value,
            Words{"the layer's, ", whole(size.wanted)});
}

void check_layer(const Call& c, const CachedTensors& t, const LayerRecord& layer) {
  check_sizes(c, layer);
  const char* stored = dtype_name(t.kv_cache.scalar_type());
  require(static_cast<double>(c.dtype) == layer.dtype, "query dtype", dtype_name(t.query.scalar_type()), "the layer's");
  require(static_cast<double>(c.kv_dtype) == layer.kv_dtype, "kv_cache dtype", stored, "the layer's");
  require(t.out.size(0) == t.query.size(0), "out rows", t.out.size(0), Words{"those of query, ", t.query.size(0)});
  const bool fp8 = c.kv_dtype == DType::kE4M3 || c.kv_dtype == DType::kE5M2;
  require(fp8 || c.kv_dtype == c.dtype, "kv_cache dtype", stored, "query's, or fp8");
  require(fp8 || (layer.k_scale == 1 && layer.v_scale == 1), "layer k_scale, v_scale", layer.k_scale,
          "1, unless the cache is fp8");
  check_written("new_key", t.new_key, t.new_value, t.query, c);
  check_written("new_value", t.new_value, t.new_key, t.query, c);
}

void set_cache(Call& c, const Tensor& cache) {
  require_tensor("kv_cache", cache, {-1, 2, -1, c.num_kv_heads, c.head_size});
  c.kv_dtype = stored_dtype("kv_cache", cache);
  c.block_size = cache.size(2);
  require(c.block_size >= 1, "block_size", c.block_size, "at least 1");
  const int64_t size = static_cast<int64_t>(cache.element_size());
  c.key = {static_cast<char*>(cache.data_ptr()), cache.stride(0) * size, cache.stride(2) * size, cache.stride(3) * size};
  c.value = c.key;
  if (c.value.data) c.value.data += cache.stride(1) * size;
}

}  // namespace

Call call_of(const AttentionTensors& t, const PlanHeader& plan) {
  Call c = {};
  set_sizes(c, plan);
  set_rows(c, t.query, t.out, plan);
  set_lse(c, t.lse, plan);
  set_keys(c, t, plan);
  set_batch(c, t, plan);
  c.sinks = per_head("sinks", t.sinks, plan.num_heads);
  c.alibi = per_head("alibi_slopes", t.alibi_slopes, plan.num_heads);
  check_lengths(c, c.table ? t.block_table->size(1) : 0, t.key.size(0));
  check_tokens(c, plan);
  check_table(c, t.key.size(0));
  return c;
}

Call call_of(const CachedTensors& t, const PlanView& plan, const LayerRecord& layer) {
  const PlanHeader& h = *plan.header;
  require(h.plain == 1, "plan", "of requests with rules of their own", "one without, or attn_cpu::attention");
  Call c = {};
  set_sizes(c, h);
  set_rows(c, t.query, t.out, h);
  set_cache(c, t.kv_cache);
  check_layer(c, t, layer);
  set_table(c, t.block_table);
  c.query_start = plan.query_start;
  c.seq_lens = plan.seq_lens;
  c.causal = h.causal != 0;
  c.left = h.left, c.right = h.right, c.chunk = h.chunk;
  check_lengths(c, t.block_table.size(1), 0);
  check_tokens(c, h);
  check_table(c, t.kv_cache.size(0));
  return c;
}

void check_contents(const Call& c) {
  for (int i = 0; i < c.num_ranges; i++) {
    const int32_t* r = c.ranges + 3 * i;
    const bool ok = r[0] >= 0 && r[0] < c.num_reqs && r[1] >= 0 && r[1] <= r[2];
    require(ok, "mm_prefix_ranges", i, "rows (request, start, end) with 0 <= start <= end");
  }
}

}  // namespace attn_cpu
