#include "plan.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "isa.h"

namespace attn_cpu {
namespace {

constexpr int32_t kMagic = 0x41545031;
constexpr int64_t kKeyStep = 128;      // splits are multiples of what a kernel takes at once
constexpr int64_t kSplitRows = 64;     // more rows than this are work enough without splitting keys
constexpr int64_t kLeastSplit = 512;   // keys below which a split costs more than it spreads
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kInvariantSplit = 2048, kInvariantParts = 16;
constexpr int64_t kLeastRows = 256;

struct Request {
  int index;
  int64_t rows, from, to;  // rows of one kv head; keys that any of them sees
};

struct Options {
  bool causal, invariant, has_ranges;
  const bool* causal_of;
  int64_t left, right, chunk;
  int64_t group, kv_heads, threads;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Request request_at(const Options& o, int b, int64_t query_len, int64_t len) {
  Request r = {b, query_len * o.group, 0, len};
  if (o.has_ranges || len == 0) return r;
  const int64_t first = len - query_len, last = len - 1;
  const bool causal = o.causal_of ? o.causal_of[b] : o.causal;
  if (o.left >= 0) r.from = std::max(r.from, first - o.left);
  if (o.chunk > 0 && first >= 0) r.from = std::max(r.from, first / o.chunk * o.chunk);
  if (causal) r.to = std::min(r.to, last + 1);
  if (o.right >= 0) r.to = std::min(r.to, last + o.right + 1);
  return r;
}

int64_t split_of(const Options& o, const std::vector<Request>& requests) {
  int64_t keys = 0;
  for (const Request& r : requests)
    if (r.rows <= kSplitRows) keys += (r.to - r.from) * o.kv_heads;
  return std::max(kLeastSplit, keys / (o.threads * kItemsPerThread) / kKeyStep * kKeyStep);
}

// How many parts the keys of a request are read in.
int64_t parts_of(const Options& o, const Request& r, int64_t split) {
  const int64_t keys = r.to - r.from;
  if (r.rows > kSplitRows || r.rows == 0) return 1;
  // A request's own length alone decides, so that its sums do not depend on the batch.
  if (o.invariant) return std::clamp<int64_t>(keys / kInvariantSplit, 1, kInvariantParts);
  return std::max<int64_t>(1, (keys + split / 2) / split);
}

int64_t rows_per_item(const Options& o, const std::vector<Request>& requests, int64_t head_size) {
  int64_t all = 0;
  for (const Request& r : requests) all += r.rows * o.kv_heads;
  // Larger items reuse packed keys more often, but leave a tail. Wide heads take fewer, to stay in cache.
  const int64_t most = std::max<int64_t>(128, kMaxRows * 128 / std::max<int64_t>(128, head_size) / 64 * 64);
  const int64_t rows = std::clamp<int64_t>(all / (o.threads * 6), kLeastRows, most) / 64 * 64;
  return std::max<int64_t>(64, rows);
}

struct Draft {
  std::vector<PlanEntry> entries;
  std::vector<PlanGroup> groups;
  int64_t partial_rows = 0;
};

void add_split(Draft& d, const Request& r, int64_t parts) {
  const int64_t start = r.from / kKeyStep * kKeyStep;
  const int64_t step = ceil_div(ceil_div(r.to - start, parts), kKeyStep) * kKeyStep;
  parts = ceil_div(r.to - start, step);
  const int rows = static_cast<int>(r.rows);
  int group = -1;
  if (parts > 1) {
    group = static_cast<int>(d.groups.size());
    d.groups.push_back({r.index, 0, rows, static_cast<int>(parts), static_cast<int>(d.partial_rows), 0});
  }
  for (int64_t i = 0; i < parts; i++) {
    const int64_t k0 = i == 0 ? r.from : start + i * step, k1 = std::min(r.to, start + (i + 1) * step);
    d.entries.push_back({r.index, 0, rows, static_cast<int>(k0), static_cast<int>(k1), group,
                         static_cast<int>(d.partial_rows), 0});
    if (group >= 0) d.partial_rows += rows;
  }
}

void add_rows(Draft& d, const Request& r, int64_t rows_per) {
  for (int64_t r0 = 0; r0 < r.rows; r0 += rows_per)
    d.entries.push_back({r.index, static_cast<int>(r0), static_cast<int>(std::min(r.rows, r0 + rows_per)),
                         static_cast<int>(r.from), static_cast<int>(r.to), -1, 0, 0});
}

int64_t cost_of(const Options& o, const PlanEntry& e, const Request& r, bool causal) {
  int64_t keys = e.k1 - e.k0;
  if (causal && r.rows > kSplitRows) keys -= (r.rows - e.r1) / o.group;
  // Few rows pay for reading keys, many for multiplying.
  return std::max<int64_t>(keys, 0) * std::max<int64_t>(40, e.r1 - e.r0);
}

Draft draft_of(const Options& o, const std::vector<Request>& requests, int64_t head_size) {
  Draft d;
  const int64_t split = split_of(o, requests), rows_per = rows_per_item(o, requests, head_size);
  for (const Request& r : requests) {
    if (r.rows == 0) continue;
    const int64_t parts = r.to > r.from ? parts_of(o, r, split) : 1;
    if (parts > 1) add_split(d, r, parts);
    else add_rows(d, r, rows_per);
  }
  // Longest first, so that no thread starts a long item when the others are done.
  auto cost = [&](const PlanEntry& e) { return cost_of(o, e, requests[e.request], o.causal); };
  std::stable_sort(d.entries.begin(), d.entries.end(),
                   [&](const PlanEntry& x, const PlanEntry& y) { return cost(x) > cost(y); });
  return d;
}

// Words that follow the groups: offsets and lengths.
int64_t batch_words(int64_t num_reqs) { return 2 * num_reqs + 1; }

Tensor pack(const PlanHeader& header, const Draft& d, const int32_t* starts, const int32_t* lens) {
  const int64_t bytes = sizeof(PlanHeader) + d.entries.size() * sizeof(PlanEntry) + d.groups.size() * sizeof(PlanGroup) +
                        batch_words(header.num_reqs) * 4;
  Tensor plan = torch::stable::empty({bytes / 4}, ScalarType::Int);
  char* p = static_cast<char*>(plan.data_ptr());
  const auto append = [&p](const void* from, size_t size) {
    if (size) memcpy(p, from, size);  // an empty vector may have no address
    p += size;
  };
  append(&header, sizeof header);
  append(d.entries.data(), d.entries.size() * sizeof(PlanEntry));
  append(d.groups.data(), d.groups.size() * sizeof(PlanGroup));
  append(starts, (int64_t{header.num_reqs} + 1) * 4);
  append(lens, int64_t{header.num_reqs} * 4);
  return plan;
}

void check_sizes(int64_t num_heads, int64_t num_kv_heads, int64_t head_size, int64_t head_size_v, int64_t threads) {
  require(num_kv_heads >= 1, "num_kv_heads", num_kv_heads, "at least 1");
  require(num_heads >= 1 && num_heads % num_kv_heads == 0, "num_heads", num_heads,
          Words{"a multiple of num_kv_heads = ", num_kv_heads});
  require(num_heads < (1 << 20), "num_heads", num_heads, "below 2^20");
  for (auto [name, size] : {std::pair{"head_size", head_size}, std::pair{"head_size_v", head_size_v}})
    require(size >= 8 && size <= 576 && size % 8 == 0, name, size, "a multiple of 8 from 8 to 576");
  require(threads >= 1 && threads <= 4096, "num_threads", threads, "1 to 4096");
}

std::vector<Request> requests_of(const Options& o, const int32_t* starts, const int32_t* lens, int64_t n) {
  std::vector<Request> requests;
  for (int64_t b = 0; b < n; b++) {
    const int64_t query_len = int64_t{starts[b + 1]} - starts[b];
    require(starts[b] >= 0 && query_len >= 0, "query_start_loc", query_len, "non-decreasing offsets from 0 on");
    require(query_len * o.group < (int64_t{1} << 30), "query length", query_len, "fewer than 2^30 rows per kv head");
    require(lens[b] >= 0, "seq_lens", lens[b], "lengths >= 0");
    requests.push_back(request_at(o, static_cast<int>(b), query_len, lens[b]));
  }
  return requests;
}

}  // namespace

PlanView view_plan(const Tensor& plan) {
  require_tensor("plan", plan, {-1});
  require_dtype("plan", plan, ScalarType::Int);
  const int64_t words = plan.size(0), least = sizeof(PlanHeader) / 4;
  require(words >= least, "plan length", words, "what attn_cpu::plan returned");
  const char* p = static_cast<const char*>(plan.data_ptr());
  PlanView view;
  view.header = reinterpret_cast<const PlanHeader*>(p);
  const PlanHeader& h = *view.header;
  require(h.magic == kMagic, "plan", h.magic, "what attn_cpu::plan returned");
  const bool counts = h.num_entries >= 0 && h.num_groups >= 0 && h.partial_rows >= 0 && h.num_threads >= 1 &&
                      h.num_reqs >= 0;
  const int64_t want = least + int64_t{h.num_entries} * 8 + int64_t{h.num_groups} * 6 + batch_words(h.num_reqs);
  require(counts && want == words, "plan length", words, Words{"", want, ", as its header says"});
  view.entries = reinterpret_cast<const PlanEntry*>(p + sizeof(PlanHeader));
  view.groups = reinterpret_cast<const PlanGroup*>(view.entries + h.num_entries);
  view.query_start = reinterpret_cast<const int32_t*>(view.groups + h.num_groups);
  view.seq_lens = view.query_start + h.num_reqs + 1;
  const bool heads = h.num_kv_heads >= 1 && h.num_heads >= 1 && h.num_heads % h.num_kv_heads == 0;
  const bool sizes = h.head_size >= 8 && h.head_size <= 576 && h.head_size_v >= 8 && h.head_size_v <= 576;
  require(heads && sizes, "plan", "damaged", "what attn_cpu::plan returned");
  return view;
}

void check_plan(const PlanView& plan, const int32_t* query_start, const int32_t* seq_lens, int group) {
  const PlanHeader& h = *plan.header;
  auto rows_of = [&](int b) { return (int64_t{query_start[b + 1]} - query_start[b]) * group; };
  auto rows_fit = [&](int b, int r0, int r1) {
    return b >= 0 && b < h.num_reqs && r0 >= 0 && r0 < r1 && r1 <= rows_of(b);
  };
  const char* allowed = "a plan for the call's query_start_loc and seq_lens";
  for (int i = 0; i < h.num_groups; i++) {
    const PlanGroup& g = plan.groups[i];
    const bool ok = rows_fit(g.request, g.r0, g.r1) && g.parts >= 1 && g.partial_row >= 0 &&
                    g.partial_row + int64_t{g.parts} * (g.r1 - g.r0) <= h.partial_rows;
    require(ok, "plan group", i, allowed);
  }
  for (int i = 0; i < h.num_entries; i++) {
    const PlanEntry& e = plan.entries[i];
    bool ok = rows_fit(e.request, e.r0, e.r1) && e.r1 - e.r0 <= kMaxRows && e.k0 >= 0 && e.k1 >= 0 && e.k1 <= seq_lens[e.request];
    ok = ok && e.group >= -1 && e.group < h.num_groups && e.partial_row >= 0;
    ok = ok && (e.group < 0 || e.partial_row + int64_t{e.r1 - e.r0} <= h.partial_rows);
    require(ok, "plan entry", i, allowed);
  }
}

WorkspaceLayout layout_of(const PlanHeader& h, size_t scratch) {
  auto align = [](int64_t n) { return (n + 4095) / 4096 * 4096; };
  WorkspaceLayout w;
  w.counters = 0;
  w.partials = align(int64_t{h.num_groups} * h.num_kv_heads * 4);
  w.scratch = w.partials + align(int64_t{h.partial_rows} * h.num_kv_heads * partial_stride(h.head_size_v) * 4);
  w.scratch_step = align(static_cast<int64_t>(scratch));
  w.bytes = w.scratch + w.scratch_step * h.num_threads + 64;  // 64: to align what the caller gives
  return w;
}

Tensor plan_op(const Tensor& query_start_loc, const Tensor& seq_lens, int64_t num_heads, int64_t num_kv_heads,
               int64_t head_size, int64_t head_size_v, bool causal, const OptTensor& causal_per_request,
               std::optional<int64_t> window_left, std::optional<int64_t> window_right,
               std::optional<int64_t> chunk_size, bool has_mm_prefix, int64_t num_threads, bool batch_invariant) {
  check_sizes(num_heads, num_kv_heads, head_size, head_size_v, num_threads);
  require_tensor("seq_lens", seq_lens, {-1});
  require_dtype("seq_lens", seq_lens, ScalarType::Int);
  const int64_t n = seq_lens.size(0);
  require_tensor("query_start_loc", query_start_loc, {n + 1});
  require_dtype("query_start_loc", query_start_loc, ScalarType::Int);
  Options o = {causal, batch_invariant, has_mm_prefix, nullptr, window_left.value_or(-1), window_right.value_or(-1),
               chunk_size.value_or(-1), num_heads / num_kv_heads, num_kv_heads, num_threads};
  if (causal_per_request) {
    require_tensor("causal_per_request", *causal_per_request, {n});
    require_dtype("causal_per_request", *causal_per_request, ScalarType::Bool);
    o.causal_of = static_cast<const bool*>(causal_per_request->data_ptr());
  }
  const auto* starts = static_cast<const int32_t*>(query_start_loc.data_ptr());
  const auto* lens = static_cast<const int32_t*>(seq_lens.data_ptr());
  const auto requests = requests_of(o, starts, lens, n);
  const Draft d = draft_of(o, requests, std::max(head_size, head_size_v));
  // A bound past every position is none.
  const auto bound = [](int64_t x) { return static_cast<int32_t>(x < 0 || x > INT32_MAX ? -1 : x); };
  const PlanHeader header = {kMagic, static_cast<int>(n), starts[n], static_cast<int>(num_heads),
                             static_cast<int>(num_kv_heads), static_cast<int>(head_size), static_cast<int>(head_size_v),
                             static_cast<int>(num_threads), static_cast<int>(d.entries.size()),
                             static_cast<int>(d.groups.size()), static_cast<int>(d.partial_rows), causal,
                             bound(o.left), bound(o.right), bound(o.chunk), !causal_per_request && !has_mm_prefix};
  return pack(header, d, starts, lens);
}

int64_t workspace_bytes_op(const Tensor& plan) {
  // Enough for whichever level a call will use.
  const PlanHeader& h = *view_plan(plan).header;
  size_t scratch = 0;
  for (int isa = 0; isa < kIsaCount; isa++)
    if (const Kernels* k = kernels_of(isa)) scratch = std::max(scratch, k->scratch_bytes(h.head_size, h.head_size_v));
  return layout_of(h, scratch).bytes;
}

}  // namespace attn_cpu
