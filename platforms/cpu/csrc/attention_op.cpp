#include "attention_op.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "call.h"
#include "isa.h"
#include "other_ops.h"

namespace attn_cpu {
namespace {

struct Free {
  void operator()(char* p) const { std::free(p); }
};

// The caller's workspace, or memory of this call's own where there is none.
class Workspace {
 public:
  Workspace(const OptTensor& given, const WorkspaceLayout& layout) {
    if (given) {
      require_tensor("workspace", *given, {-1});
      require_dtype("workspace", *given, ScalarType::Byte);
      require(given->size(0) >= layout.bytes, "workspace length", given->size(0),
              Words{"at least workspace_bytes(plan) = ", layout.bytes});
    }
    // Layers and plans share it: the first call gets it, one that meets it in use works in memory of its own.
    has_shared_ = given && !in_use.test_and_set(std::memory_order_acquire);
    if (has_shared_) {
      const auto at = reinterpret_cast<uintptr_t>(given->data_ptr());
      data = reinterpret_cast<char*>((at + 63) / 64 * 64);
      return;
    }
    own_.reset(static_cast<char*>(std::aligned_alloc(4096, (layout.bytes + 4095) / 4096 * 4096)));
    require(own_ != nullptr, "workspace", "None", "a tensor: there is no memory for one of the call's own");
    data = own_.get();
  }
  ~Workspace() {
    if (has_shared_) in_use.clear(std::memory_order_release);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  char* data;

 private:
  inline static std::atomic_flag in_use = ATOMIC_FLAG_INIT;
  bool has_shared_;
  std::unique_ptr<char, Free> own_;
};

// The items of a plan, worked off by whichever thread is free.
class Run {
 public:
  Run(const Call& call, const PlanView& plan, const Kernels& kernels, const WorkspaceLayout& layout, char* memory)
      : call_(call), plan_(plan), kernels_(kernels), layout_(layout), memory_(memory) {
    memset(memory_, 0, static_cast<size_t>(plan.header->num_groups) * call.num_kv_heads * 4);
    items_ = int64_t{plan.header->num_entries} * call.num_kv_heads;
  }

  int64_t items() const { return items_; }

  void work(int64_t thread) {
    char* scratch = memory_ + layout_.scratch + thread * layout_.scratch_step;
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < items_;)
      attend(plan_.entries[i / call_.num_kv_heads], static_cast<int>(i % call_.num_kv_heads), scratch);
  }

 private:
  float* partial(int64_t row, int64_t rows, int h) const {
    float* base = reinterpret_cast<float*>(memory_ + layout_.partials);
    // All heads of one part lie together, so that parts of a group are a fixed distance apart.
    return base + (row * call_.num_kv_heads + h * rows) * partial_stride(call_.head_size_v);
  }

  void attend(const PlanEntry& e, int h, char* scratch) {
    Item item = {e.request, h, e.r0, e.r1, e.k0, e.k1, nullptr};
    if (e.group >= 0) item.partial = partial(e.partial_row, e.r1 - e.r0, h);
    kernels_.attend(call_, item, scratch);
    if (e.group >= 0) finish(plan_.groups[e.group], e.group, h);
  }

  // The thread that finishes the last part of a group merges all of them, in their order.
  void finish(const PlanGroup& g, int index, int h) {
    auto* counter = reinterpret_cast<int32_t*>(memory_) + int64_t{index} * call_.num_kv_heads + h;
    if (__atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL) != g.parts) return;
    const int rows = g.r1 - g.r0;
    const int64_t step = int64_t{rows} * call_.num_kv_heads * partial_stride(call_.head_size_v);
    kernels_.merge(call_, Merge{g.request, h, g.r0, g.r1, g.parts, step, partial(g.partial_row, rows, h)});
  }

  const Call& call_;
  const PlanView& plan_;
  const Kernels& kernels_;
  const WorkspaceLayout& layout_;
  char* memory_;
  int64_t items_;
  std::atomic<int64_t> next_{0};
};

int64_t bound_of(const char* name, std::optional<int64_t> bound) {
  const int64_t n = bound.value_or(-1);
  require(n >= -1, name, n, ">= 0, or None for unbounded");
  return n;
}

void set_options(Call& c, double scale, std::optional<double> softcap, bool causal) {
  require(std::isfinite(scale), "scale", scale, "a finite number");
  require(!softcap || (std::isfinite(*softcap) && *softcap > 0), "softcap", softcap.value_or(0),
          "a positive finite number, or None for off");
  c.scale = static_cast<float>(scale);
  c.softcap = static_cast<float>(softcap.value_or(0.0));
  c.causal = causal;
}

const Kernels& kernels_for(int64_t isa) {
  const int level = choose_isa(isa);
  require(level >= 0, "isa", isa, "-1, or a level in isa_supported(cpu_features())");
  return *kernels_of(level);
}

// `rows`: what is written before, when nothing is left that could be refused; null: nothing.
void attend(const Call& c, const PlanView& plan, const Kernels& kernels, const OptTensor& workspace,
            const WriteCall* rows = nullptr) {
  check_plan(plan, c.query_start, c.seq_lens, c.group);
  const PlanHeader& h = *plan.header;
  const WorkspaceLayout layout = layout_of(h, kernels.scratch_bytes(h.head_size, h.head_size_v));
  const Workspace memory(workspace, layout);
  if (rows) write_rows(*rows);
  Run run(c, plan, kernels, layout, memory.data);
  const int64_t threads = std::min<int64_t>({h.num_threads, torch::stable::get_num_threads(), run.items()});
  if (threads <= 1) return run.items() ? run.work(0) : void();
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) run.work(i);
  });
}

LayerRecord record_of(const Tensor& layer) {
  require_tensor("layer", layer, {sizeof(LayerRecord) / 8});
  require_dtype("layer", layer, ScalarType::Double);
  LayerRecord record;
  memcpy(&record, layer.data_ptr(), sizeof record);
  return record;
}

// A call over a whole cache, with the scales that it points to.
struct CachedCall {
  CachedCall(const CachedTensors& t, const PlanView& plan, const LayerRecord& layer)
      : k_scale(static_cast<float>(layer.k_scale)),
        v_scale(static_cast<float>(layer.v_scale)),
        call(call_of(t, plan, layer)) {
    set_options(call, layer.scale, layer.softcap == 0 ? std::nullopt : std::optional(layer.softcap), call.causal);
    require(call.chunk != 0, "chunk_size", 0, ">= 1, or None for off");
    if (call.kv_dtype != call.dtype) call.k_scale = &k_scale, call.v_scale = &v_scale;
  }
  CachedCall(const CachedCall&) = delete;
  CachedCall& operator=(const CachedCall&) = delete;
  const float k_scale, v_scale;
  Call call;
};

}  // namespace

void attention_op(Tensor query, Tensor out, OptTensor lse, Tensor key, Tensor value, OptTensor block_table,
                  Tensor query_start_loc, Tensor seq_lens, OptTensor key_start_loc, Tensor plan, OptTensor workspace,
                  double scale, std::optional<double> softcap, std::optional<int64_t> window_left,
                  std::optional<int64_t> window_right, std::optional<int64_t> chunk_size, bool causal,
                  OptTensor causal_per_request, OptTensor sinks, OptTensor alibi_slopes, OptTensor k_scale,
                  OptTensor v_scale, OptTensor key_scales, OptTensor value_scales, OptTensor mm_prefix_ranges,
                  bool checked, int64_t isa) {
  const AttentionTensors t = {query, out, lse, key, value, block_table, query_start_loc, seq_lens, key_start_loc, plan,
                              workspace, causal_per_request, sinks, alibi_slopes, k_scale, v_scale, key_scales,
                              value_scales, mm_prefix_ranges};
  const Kernels& kernels = kernels_for(isa);
  const PlanView view = view_plan(plan);
  Call c = call_of(t, *view.header);
  set_options(c, scale, softcap, causal);
  c.left = bound_of("window_left", window_left);
  c.right = bound_of("window_right", window_right);
  c.chunk = bound_of("chunk_size", chunk_size);
  require(c.chunk != 0, "chunk_size", 0, ">= 1, or None for off");
  if (checked) check_contents(c);
  attend(c, view, kernels, workspace);
}

void attention_cached_op(Tensor query, Tensor out, OptTensor new_key, OptTensor new_value, Tensor kv_cache,
                         Tensor block_table, Tensor plan, OptTensor workspace, Tensor layer, int64_t isa) {
  const Kernels& kernels = kernels_for(isa);
  const PlanView view = view_plan(plan);
  const CachedCall cached({query, out, new_key, new_value, kv_cache, block_table, plan, layer}, view, record_of(layer));
  attend(cached.call, view, kernels, workspace);
}

void write_and_attend_op(Tensor query, Tensor out, Tensor key, Tensor value, Tensor kv_cache, Tensor slot_mapping,
                         Tensor block_table, Tensor plan, OptTensor workspace, Tensor layer, int64_t isa) {
  const Kernels& kernels = kernels_for(isa);
  const PlanView view = view_plan(plan);
  const OptTensor new_key(key), new_value(value);
  const CachedCall cached({query, out, new_key, new_value, kv_cache, block_table, plan, layer}, view, record_of(layer));
  const Call& c = cached.call;
  require_writable("kv_cache", kv_cache);
  WriteCall w = new_rows(key, value, slot_mapping, kv_cache.size(0) * c.block_size, true);
  w.block_size = c.block_size;
  w.kv_dtype = c.kv_dtype;
  w.key_cache = c.key, w.value_cache = c.value;
  w.k_scale = c.k_scale, w.v_scale = c.v_scale;
  attend(c, view, kernels, workspace, &w);
}

}  // namespace attn_cpu
