// What one ISA level offers, and the plain records that its kernels read. Kernels are compiled with their own
// machine flags, so this header has no inline code that a linker could take from the wrong translation unit.
#pragma once
#include <cstddef>
#include <cstdint>

namespace attn_cpu {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16, kE4M3, kE5M2, kInt8 };

struct KvView {     // strides in bytes, so that every stored dtype is addressed alike
  char* data;
  int64_t block, slot, head;
};
struct ScaleView {  // strides in elements
  float* data;
  int64_t block, slot, head;
};

struct Call {
  const char* query;  // strides of query and out in elements
  int64_t query_token, query_head;
  char* out;
  int64_t out_token, out_head;
  float* lse;
  int64_t lse_head, lse_token;
  KvView key, value;
  ScaleView key_scales, value_scales;
  const int32_t* table;  // null: cache-free, and block_size is larger than any sequence
  int64_t table_row;
  int64_t block_size;
  const int32_t *query_start, *seq_lens, *key_start;
  int num_reqs, num_heads, num_kv_heads, group, head_size, head_size_v;
  float scale, softcap;            // softcap 0: off
  int64_t left, right, chunk;      // -1: off
  bool causal;
  const bool* causal_of;
  const float *sinks, *alibi, *k_scale, *v_scale;
  int k_scale_step, v_scale_step;  // 0: one scale for all heads
  const int32_t* ranges;
  int num_ranges;
  DType dtype, kv_dtype;
  float* partials;
};

// Rows [r0, r1) of one request and kv head over keys [k0, k1). `partial` is where unnormalised results go
// (row-wise, partial_stride floats each), or null: the rows are finished here.
struct Item {
  int b, h, r0, r1, k0, k1;
  float* partial;
};

// Partial results of the same rows, `step` floats apart.
struct Merge {
  int b, h, r0, r1, count;
  int64_t step;
  const float* partial;
};

struct WriteCall {
  const char *key, *value;  // strides in elements
  int64_t key_token, key_head, value_token, value_head;
  KvView key_cache, value_cache;
  ScaleView key_scales, value_scales;
  const int64_t* slots;
  int64_t num_slots, block_size;
  int num_kv_heads, head_size, head_size_v;
  const float *k_scale, *v_scale;
  int k_scale_step, v_scale_step;
  DType dtype, kv_dtype;
};

struct Kernels {
  // Bytes of scratch that one thread needs for heads of these sizes.
  size_t (*scratch_bytes)(int head_size, int head_size_v);
  void (*attend)(const Call&, const Item&, char* scratch);
  void (*merge)(const Call&, const Merge&);
  void (*write)(const WriteCall&, int64_t begin, int64_t end);
};

// Null where the level is not built for this processor.
const Kernels* kernels_of(int isa);

// Floats between the rows of partial results: the accumulator, its reference exponent, its denominator.
int64_t partial_stride(int head_size_v);

constexpr int kMaxRows = 1024;  // rows of one item

}  // namespace attn_cpu
