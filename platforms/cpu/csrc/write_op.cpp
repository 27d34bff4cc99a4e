#include <torch/csrc/stable/ops.h>

#include "check.h"
#include "isa.h"
#include "other_ops.h"

namespace attn_cpu {
namespace {

ScaleView scale_target(const char* name, const OptTensor& t, const Tensor& cache, bool needed) {
  if (!needed) {
    require(!t, name, "a tensor", "None, unless the cache is int8");
    return ScaleView{nullptr, 0, 0, 0};
  }
  require(t.has_value(), name, "None", "float32 (num_blocks, block_size, Hkv) with an int8 cache");
  require_tensor(name, *t, {cache.size(0), cache.size(1), cache.size(2)}, false);
  require_dtype(name, *t, ScalarType::Float);
  require_writable(name, *t);
  return ScaleView{static_cast<float*>(t->data_ptr()), t->stride(0), t->stride(1), t->stride(2)};
}

KvView cache_view(const char* name, const Tensor& t) {
  require_writable(name, t);
  const int64_t size = static_cast<int64_t>(t.element_size());
  return KvView{static_cast<char*>(t.data_ptr()), t.stride(0) * size, t.stride(1) * size, t.stride(2) * size};
}

void set_rows(WriteCall& w, const Tensor& key, const Tensor& value, int64_t num_slots) {
  w.dtype = compute_dtype("key", key);
  require_dtype("value", value, key.scalar_type());
  require(key.size(0) >= num_slots, "key rows", key.size(0), Words{"at least ", num_slots, ", one per slot"});
  require(value.size(0) >= num_slots, "value rows", value.size(0), Words{"at least ", num_slots, ", one per slot"});
  w.key = static_cast<const char*>(key.data_ptr());
  w.value = static_cast<const char*>(value.data_ptr());
  w.key_token = key.stride(0);
  w.key_head = key.stride(1);
  w.value_token = value.stride(0);
  w.value_head = value.stride(1);
  w.num_kv_heads = static_cast<int>(key.size(1));
  w.head_size = static_cast<int>(key.size(2));
  w.head_size_v = static_cast<int>(value.size(2));
}

void check_slots(const WriteCall& w, int64_t limit, bool checked) {
  for (int64_t i = 0; i < w.num_slots; i++) {
    // In either mode: a slot outside would be written over somebody else's memory.
    const bool ok = w.slots[i] < limit && (!checked || w.slots[i] >= -1);
    if (!ok)
      refuse(("slot_mapping[" + std::to_string(i) + "]").c_str(), w.slots[i], "-1 to " + std::to_string(limit - 1));
  }
}

}  // namespace

WriteCall new_rows(const Tensor& key, const Tensor& value, const Tensor& slot_mapping, int64_t limit, bool checked) {
  require_tensor("slot_mapping", slot_mapping, {-1});
  require_dtype("slot_mapping", slot_mapping, ScalarType::Long);
  for (const Tensor* t : {&key, &value})
    require(t->size(2) % 8 == 0 && t->size(2) > 0, "head size", t->size(2), "a multiple of 8");
  WriteCall w = {};
  w.num_slots = slot_mapping.size(0);
  set_rows(w, key, value, w.num_slots);
  w.slots = static_cast<const int64_t*>(slot_mapping.data_ptr());
  check_slots(w, limit, checked);
  return w;
}

void write_rows(const WriteCall& w) {
  const Kernels& kernels = *kernels_of(choose_isa(-1));
  // A token of a layer is small: fewer than this many are not worth waking another thread.
  if (w.num_slots <= 32) return kernels.write(w, 0, w.num_slots);
  torch::stable::parallel_for(0, w.num_slots, 32, [&](int64_t begin, int64_t end) { kernels.write(w, begin, end); });
}

void write_kv_op(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping, OptTensor k_scale,
                 OptTensor v_scale, OptTensor key_scales, OptTensor value_scales, bool checked) {
  require_tensor("key", key, {-1, -1, -1});
  require_tensor("value", value, {-1, key.size(1), -1});
  require_tensor("key_cache", key_cache, {-1, -1, key.size(1), key.size(2)});
  require_tensor("value_cache", value_cache, {key_cache.size(0), key_cache.size(1), key.size(1), value.size(2)});
  WriteCall w = new_rows(key, value, slot_mapping, key_cache.size(0) * key_cache.size(1), checked);
  w.block_size = key_cache.size(1);
  w.kv_dtype = stored_dtype("key_cache", key_cache);
  require_dtype("value_cache", value_cache, key_cache.scalar_type());
  const bool fp8 = w.kv_dtype == DType::kE4M3 || w.kv_dtype == DType::kE5M2, int8 = w.kv_dtype == DType::kInt8;
  require(fp8 || int8 || w.kv_dtype == w.dtype, "key_cache dtype", dtype_name(key_cache.scalar_type()),
          std::string(dtype_name(key.scalar_type())) + ", key's, or a quantised one");
  require(fp8 || (!k_scale && !v_scale), "k_scale or v_scale", "a tensor", "None, unless the cache is fp8");
  w.key_cache = cache_view("key_cache", key_cache);
  w.value_cache = cache_view("value_cache", value_cache);
  w.k_scale = scales_of("k_scale", k_scale, w.num_kv_heads, &w.k_scale_step);
  w.v_scale = scales_of("v_scale", v_scale, w.num_kv_heads, &w.v_scale_step);
  w.key_scales = scale_target("key_scales", key_scales, key_cache, int8);
  w.value_scales = scale_target("value_scales", value_scales, value_cache, int8);
  write_rows(w);
}

}  // namespace attn_cpu
