// How a batch is cut into items for threads. A plan is an int32 tensor: a header, entries, groups, and the batch's own
// offsets and lengths, so that a call needs no tensors of them.
//
// An entry is rows [r0, r1) of a request over keys [k0, k1), for each kv head; a group is a run of entries over
// the same rows whose partial results are merged.
#pragma once
#include <cstdint>

#include "check.h"

namespace attn_cpu {

struct PlanHeader {
  int32_t magic, num_reqs, num_tokens, num_heads, num_kv_heads, head_size, head_size_v, num_threads;
  int32_t num_entries, num_groups, partial_rows;  // partial_rows: per kv head
  int32_t causal, left, right, chunk;             // of all requests; -1: off
  int32_t plain;                                  // no rule of a request's own, no multimodal ranges
};
struct PlanEntry {
  int32_t request, r0, r1, k0, k1, group, partial_row, reserved;  // group -1: the rows are finished at once
};
struct PlanGroup {
  int32_t request, r0, r1, parts, partial_row, reserved;  // part i starts at partial_row + i * (r1 - r0)
};

struct PlanView {
  const PlanHeader* header;
  const PlanEntry* entries;
  const PlanGroup* groups;
  const int32_t *query_start, *seq_lens;  // those that it was made for
};

// Sizes and magic fit each other; contents are checked against a call by check_plan.
PlanView view_plan(const Tensor& plan);
// Every entry lies inside the call's rows and keys, and partial results inside their buffer.
void check_plan(const PlanView& plan, const int32_t* query_start, const int32_t* seq_lens, int group);

// Where the parts of a workspace begin, and its length.
struct WorkspaceLayout {
  int64_t counters, partials, scratch, scratch_step, bytes;
};
WorkspaceLayout layout_of(const PlanHeader& header, size_t scratch_bytes);

Tensor plan_op(const Tensor& query_start_loc, const Tensor& seq_lens, int64_t num_heads, int64_t num_kv_heads,
               int64_t head_size, int64_t head_size_v, bool causal, const OptTensor& causal_per_request,
               std::optional<int64_t> window_left, std::optional<int64_t> window_right,
               std::optional<int64_t> chunk_size, bool has_mm_prefix, int64_t num_threads, bool batch_invariant);
int64_t workspace_bytes_op(const Tensor& plan);

}  // namespace attn_cpu
