// The ops of the library, registered under the namespace attn_cpu. All tensors live on the host.
//
// Rows of work: row = token * G + g, where token counts a request's query tokens and g the G = Hq / Hkv
// query heads of one kv head, so that heads which share keys are read together.
//
// ISA levels (bit numbers of the masks, and the values of `isa`): 0 generic, 1 avx2 (with FMA and F16C),
// 2 avx512 (F, BW, DQ, VL), 3 avx512_bf16, 4 amx_bf16, 5 neon. `isa` = -1 takes the best.
#pragma once

namespace attn_cpu {

// Attend; one call for decode, prefill, chunked and mixed batches, paged or cache-free.
//   query (T, Hq, D), out (T, Hq, Dv): float32, bfloat16 or float16, last dimension dense
//   lse (Hq, T) float32 or None: natural logarithm of the denominator
//   key (num_blocks, block_size, Hkv, D), value (num_blocks, block_size, Hkv, Dv): any strides but a dense
//       last dimension; query's dtype, float8_e4m3fn, float8_e5m2, or int8 with key_scales and value_scales.
//       With block_table None: (Tk, Hkv, D) and (Tk, Hkv, Dv), request b owning rows
//       [key_start_loc[b], key_start_loc[b + 1]).
//   block_table (B or more, M) int32, dense rows; query_start_loc (B + 1) and seq_lens (B) int32
//   plan: what `plan` returned for the same lengths, heads, window and causality
//   workspace: uint8, 1-D, at least workspace_bytes(plan) long, or None: the call allocates
//   softcap None is off; windows None or -1 are unbounded
//   causal_per_request (B) bool overrules `causal`
//   k_scale, v_scale: float32 (1) or (Hkv), of an fp8 cache; key_scales, value_scales: float32
//       (num_blocks, block_size, Hkv), of an int8 cache
//   sinks, alibi_slopes: float32 (Hq); mm_prefix_ranges: int32 (N, 3) of (request, start, end inclusive)
//   checked: also look at the contents of mm_prefix_ranges; lengths and table entries are always looked at
inline constexpr const char* kAttention =
    "attention(Tensor query, Tensor(a!) out, Tensor(b!)? lse, Tensor key, Tensor value, "
    "Tensor? block_table, Tensor query_start_loc, Tensor seq_lens, Tensor? key_start_loc, Tensor plan, "
    "Tensor(c!)? workspace, float scale, float? softcap, int? window_left, int? window_right, "
    "int? chunk_size, bool causal, Tensor? causal_per_request, Tensor? sinks, Tensor? alibi_slopes, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? key_scales, Tensor? value_scales, "
    "Tensor? mm_prefix_ranges, bool checked, int isa) -> ()";

// The same over a whole cache, for layers and batches without an LSE and without options of a head's or a request's own:
// causality, bounds, lengths and offsets are the plan's, so that a call takes few arguments.
//   new_key, new_value (any, Hkv, D), or None: what the step has written; only held against the layer
//   kv_cache (num_blocks, 2, block_size, Hkv, D), keys and then values: query's dtype or fp8; any strides but a dense
//       last dimension
//   layer: float64 (10), the layer's own: scale, softcap (0: off), k_scale and v_scale (1 but for fp8), dtype and cache
//       dtype (0 float32, 1 bfloat16, 2 float16, 3 float8_e4m3fn, 4 float8_e5m2), block size, Hq, Hkv, D
inline constexpr const char* kAttentionCached =
    "attention_cached(Tensor query, Tensor(a!) out, Tensor? new_key, Tensor? new_value, Tensor kv_cache, "
    "Tensor block_table, Tensor plan, Tensor(b!)? workspace, Tensor layer, int isa) -> ()";

// attention_cached after write_kv, in one call that writes nothing before all of it is checked.
//   key (T or more, Hkv, D), value, slot_mapping (T) int64: as in `write_kv`, slots always looked at
//   all others: as in `attention_cached`
inline constexpr const char* kWriteAndAttend =
    "write_and_attend(Tensor query, Tensor(a!) out, Tensor key, Tensor value, Tensor(b!) kv_cache, "
    "Tensor slot_mapping, Tensor block_table, Tensor plan, Tensor(c!)? workspace, Tensor layer, int isa) -> ()";

// Partition a batch for `num_threads` threads: int32 (n), host. Only lengths are read.
//   has_mm_prefix: the call will have mm_prefix_ranges, which reach beyond windows
//   batch_invariant: splits depend on a request's own length alone
inline constexpr const char* kPlan =
    "plan(Tensor query_start_loc, Tensor seq_lens, int num_heads, int num_kv_heads, int head_size, "
    "int head_size_v, bool causal, Tensor? causal_per_request, int? window_left, int? window_right, "
    "int? chunk_size, bool has_mm_prefix, int num_threads, bool batch_invariant) -> Tensor";

// Bytes of workspace that a call with this plan needs; does not grow with seq_lens.
inline constexpr const char* kWorkspaceBytes = "workspace_bytes(Tensor plan) -> int";

// Write new keys (T or more, Hkv, D) and values into the slots of slot_mapping (T) int64; -1 is left alone.
//   key_cache (num_blocks, block_size, Hkv, D), value_cache: as in `attention`; stored = value / scale,
//   saturating, for fp8; int8 writes the scales (num_blocks, block_size, Hkv) beside.
//   A slot outside the cache is an error in checked mode and is never written in either.
inline constexpr const char* kWriteKv =
    "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, Tensor? k_scale, Tensor? v_scale, Tensor(c!)? key_scales, "
    "Tensor(d!)? value_scales, bool checked) -> ()";

// Merge two shards: outputs (T, H, D), LSEs (H, T) float32 in natural logarithm; -inf and +inf are empty,
// NaN spreads, the only shard that is not empty is returned bit for bit.
inline constexpr const char* kMerge =
    "merge_attn_states(Tensor(a!) output, Tensor(b!)? output_lse, Tensor output_a, Tensor lse_a, "
    "Tensor output_b, Tensor lse_b) -> ()";

// Feature bits of this CPU that its operating system lets programs use: see isa.h.
inline constexpr const char* kCpuFeatures = "cpu_features() -> int";
// Mask of the ISA levels that were compiled in.
inline constexpr const char* kIsaBuilt = "isa_built() -> int";
// Mask of the levels among those built that a CPU with these feature bits runs.
inline constexpr const char* kIsaSupported = "isa_supported(int features) -> int";
// Ask the kernel for AMX tiles (once per process); whether it granted them.
inline constexpr const char* kAmxPermission = "amx_permission() -> bool";

}  // namespace attn_cpu
