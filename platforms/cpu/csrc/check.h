// Refusals that name the argument, its value and what is allowed.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "kernels/table.h"

namespace attn_cpu {

using torch::stable::Tensor;
using torch::headeronly::ScalarType;
using OptTensor = std::optional<Tensor>;

template <class Value>
[[noreturn]] void refuse(const char* name, const Value& value, const std::string& allowed) {
  std::ostringstream text;
  text << "attn_cpu: " << name << " is " << value << "; allowed: " << allowed;
  throw std::runtime_error(text.str());
}
// What is allowed, put into words only where it is needed: a call makes dozens of checks.
struct Words {
  const char* before;
  int64_t number;
  const char* after = "";
  explicit operator std::string() const { return before + std::to_string(number) + after; }
};
template <class Value, class Allowed>
void require(bool ok, const char* name, const Value& value, const Allowed& allowed) {
  if (!ok) refuse(name, value, std::string(allowed));
}

std::string shape_of(const Tensor& t);
std::string strides_of(const Tensor& t);
const char* dtype_name(ScalarType t);

// The tensor is on the host, has these sizes (-1: any) and memory for them, and its last dimension is dense if asked.
void require_tensor(const char* name, const Tensor& t, std::initializer_list<int64_t> sizes, bool dense_last = true);
void require_dtype(const char* name, const Tensor& t, ScalarType dtype);
// Strides are not negative, and elements of a written tensor have memory of their own.
void require_writable(const char* name, const Tensor& t);

DType compute_dtype(const char* name, const Tensor& t);
DType stored_dtype(const char* name, const Tensor& t);

// Scales of a quantised cache: null for None. `step` becomes 0 for one scale of all heads.
const float* scales_of(const char* name, const OptTensor& t, int64_t num_kv_heads, int* step);
const float* per_head(const char* name, const OptTensor& t, int64_t num_heads);

}  // namespace attn_cpu
