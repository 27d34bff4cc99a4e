#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "other_ops.h"

namespace attn_cpu {
namespace {

namespace rows {
#include "kernels/scalar.h"
}

struct Weights {
  float a, b, lse;
  bool takes_a, takes_b;
};

Weights weights_of(float a, float b) {
  // +inf is what some kernels write for a row without keys.
  if (std::isinf(a)) a = -INFINITY;
  if (std::isinf(b)) b = -INFINITY;
  if (std::isnan(a) || std::isnan(b)) return {NAN, NAN, NAN, true, true};
  const bool has_a = a != -INFINITY, has_b = b != -INFINITY;
  if (!has_a || !has_b) return {1.f, 1.f, has_a ? a : b, has_a, has_b};
  const double top = std::fmax(a, b), x = std::exp(a - top), y = std::exp(b - top), sum = x + y;
  return {static_cast<float>(x / sum), static_cast<float>(y / sum), static_cast<float>(top + std::log(sum)), true, true};
}

template <class T>
struct As;
template <>
struct As<float> {
  static float load(float x) { return x; }
  static float store(float x) { return x; }
};
struct Bf16 { uint16_t bits; };
struct F16 { uint16_t bits; };
template <>
struct As<Bf16> {
  static float load(Bf16 x) { return rows::from_bf16(x.bits); }
  static Bf16 store(float x) { return {rows::to_bf16(x)}; }
};
template <>
struct As<F16> {
  static float load(F16 x) { return rows::from_f16(x.bits); }
  static F16 store(float x) { return {rows::to_f16(x)}; }
};

template <class T>
void merge_row(const Weights& w, const T* a, const T* b, T* out, int64_t n) {
  for (int64_t d = 0; d < n; d++) {
    if (!w.takes_a && !w.takes_b) out[d] = As<T>::store(0.f);
    else if (!w.takes_b) out[d] = a[d];
    else if (!w.takes_a) out[d] = b[d];
    else out[d] = As<T>::store(As<T>::load(a[d]) * w.a + As<T>::load(b[d]) * w.b);
  }
}

template <class T>
void merge_all(const Tensor& out, const OptTensor& out_lse, const Tensor& a, const Tensor& lse_a, const Tensor& b,
               const Tensor& lse_b) {
  const int64_t heads = a.size(1), size = a.size(2);
  const auto row = [](const Tensor& t, int64_t i, int64_t h) {
    return static_cast<T*>(t.data_ptr()) + i * t.stride(0) + h * t.stride(1);
  };
  const auto at = [](const Tensor& t, int64_t i, int64_t h) {
    return static_cast<float*>(t.data_ptr()) + h * t.stride(0) + i * t.stride(1);
  };
  torch::stable::parallel_for(0, a.size(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      for (int64_t h = 0; h < heads; h++) {
        const Weights w = weights_of(*at(lse_a, i, h), *at(lse_b, i, h));
        merge_row<T>(w, row(a, i, h), row(b, i, h), row(out, i, h), size);
        if (out_lse) *at(*out_lse, i, h) = w.lse;
      }
  });
}

bool shares_memory(const Tensor& x, const Tensor& y) {
  const auto span = [](const Tensor& t) {
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
    const char* p = static_cast<const char*>(t.data_ptr());
    return std::pair{p, p + (last + 1) * static_cast<int64_t>(t.element_size())};
  };
  if (x.numel() == 0 || y.numel() == 0) return false;
  const auto a = span(x), b = span(y);
  return a.first < b.second && b.first < a.second;
}

}  // namespace

void merge_op(Tensor output, OptTensor output_lse, Tensor output_a, Tensor lse_a, Tensor output_b, Tensor lse_b) {
  require_tensor("output_a", output_a, {-1, -1, -1});
  const int64_t tokens = output_a.size(0), heads = output_a.size(1), size = output_a.size(2);
  const DType dtype = compute_dtype("output_a", output_a);
  for (auto [name, t] : {std::pair{"output_b", &output_b}, std::pair{"output", &output}}) {
    require_tensor(name, *t, {tokens, heads, size});
    require_dtype(name, *t, output_a.scalar_type());
  }
  for (auto [name, t] : {std::pair{"lse_a", &lse_a}, std::pair{"lse_b", &lse_b}}) {
    require_tensor(name, *t, {heads, tokens}, false);
    require_dtype(name, *t, ScalarType::Float);
  }
  require_writable("output", output);
  for (const Tensor* t : {&output_a, &output_b})
    require(!shares_memory(output, *t), "output", "sharing memory with an input", "memory of its own");
  if (output_lse) {
    require_tensor("output_lse", *output_lse, {heads, tokens}, false);
    require_dtype("output_lse", *output_lse, ScalarType::Float);
    require_writable("output_lse", *output_lse);
    for (const Tensor* t : {&lse_a, &lse_b})
      require(!shares_memory(*output_lse, *t), "output_lse", "sharing memory with an input", "memory of its own");
  }
  if (dtype == DType::kFloat32) return merge_all<float>(output, output_lse, output_a, lse_a, output_b, lse_b);
  if (dtype == DType::kBFloat16) return merge_all<Bf16>(output, output_lse, output_a, lse_a, output_b, lse_b);
  merge_all<F16>(output, output_lse, output_a, lse_a, output_b, lse_b);
}

}  // namespace attn_cpu
