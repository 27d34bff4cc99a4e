#include "check.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace attn_cpu {
namespace {

template <class List>
std::string listed(const List& list) {
  std::ostringstream text;
  text << "(";
  for (size_t i = 0; i < list.size(); i++) {
    text << (i ? ", " : "");
    if (list.begin()[i] < 0) text << "any";
    else text << list.begin()[i];
  }
  text << ")";
  return text.str();
}

// The last element lies in the storage: one that was freed or shrunk behind a tensor leaves its sizes as they were.
void require_memory(const char* name, const Tensor& t) {
  const auto sizes = t.sizes(), steps = t.strides();
  int64_t last = t.storage_offset(), held = 0;
  for (size_t i = 0; i < sizes.size(); i++) {
    if (sizes[i] == 0) return;
    last += (sizes[i] - 1) * steps[i];
  }
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(t.get(), &held));
  const int64_t needed = (last + 1) * static_cast<int64_t>(t.element_size());
  if (needed > held)
    refuse((std::string(name) + " storage").c_str(), std::to_string(held) + " bytes",
           "at least " + std::to_string(needed) + ", what its shape and strides reach");
}

}  // namespace

std::string shape_of(const Tensor& t) { return listed(t.sizes()); }
std::string strides_of(const Tensor& t) { return listed(t.strides()); }

const char* dtype_name(ScalarType t) {
  switch (t) {
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Float8_e5m2: return "float8_e5m2";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    case ScalarType::Double: return "float64";
    default: return "of another dtype";
  }
}

void require_tensor(const char* name, const Tensor& t, std::initializer_list<int64_t> sizes, bool dense_last) {
  require(t.is_cpu(), name, "on another device", "a tensor on the cpu");
  const auto have = t.sizes(), steps = t.strides();
  bool fits = have.size() == sizes.size();
  for (size_t i = 0; fits && i < sizes.size(); i++) fits = sizes.begin()[i] < 0 || have[i] == sizes.begin()[i];
  if (!fits) refuse((std::string(name) + " shape").c_str(), shape_of(t), listed(sizes));
  bool strided = true;
  for (size_t i = 0; i < have.size(); i++) strided &= have[i] <= 1 || steps[i] >= 0;
  if (dense_last && !have.empty()) strided &= have[have.size() - 1] <= 1 || steps[have.size() - 1] == 1;
  if (!strided)
    refuse((std::string(name) + " strides").c_str(), strides_of(t),
           dense_last ? "no negative one, and 1 for the last dimension" : "no negative one");
  require_memory(name, t);
}

void require_dtype(const char* name, const Tensor& t, ScalarType dtype) {
  if (t.scalar_type() != dtype)
    refuse((std::string(name) + " dtype").c_str(), dtype_name(t.scalar_type()), dtype_name(dtype));
}

void require_writable(const char* name, const Tensor& t) {
  const auto sizes = t.sizes(), steps = t.strides();
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size), dimensions that step
  for (size_t i = 0; i < sizes.size(); i++) {
    if (sizes[i] == 0) return;
    if (sizes[i] > 1) dims.emplace_back(steps[i], sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 1;
  for (const auto& [step, size] : dims) {
    if (step < reach)
      refuse((std::string(name) + " strides").c_str(), strides_of(t), "strides that give each element its own memory");
    reach = step * (size - 1) + reach;
  }
}

DType compute_dtype(const char* name, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Half: return DType::kFloat16;
    default:
      refuse((std::string(name) + " dtype").c_str(), dtype_name(t.scalar_type()), "float32, bfloat16 or float16");
  }
}

DType stored_dtype(const char* name, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float8_e4m3fn: return DType::kE4M3;
    case ScalarType::Float8_e5m2: return DType::kE5M2;
    case ScalarType::Char: return DType::kInt8;
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Half: return DType::kFloat16;
    default:
      refuse((std::string(name) + " dtype").c_str(), dtype_name(t.scalar_type()),
             "float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8");
  }
}

const float* scales_of(const char* name, const OptTensor& t, int64_t num_kv_heads, int* step) {
  *step = 0;
  if (!t) return nullptr;
  require_tensor(name, *t, {-1});
  require_dtype(name, *t, ScalarType::Float);
  const int64_t n = t->size(0);
  if (n != 1 && n != num_kv_heads)
    refuse((std::string(name) + " length").c_str(), n, "1 or num_kv_heads = " + std::to_string(num_kv_heads));
  *step = n == 1 ? 0 : 1;
  return static_cast<const float*>(t->data_ptr());
}

const float* per_head(const char* name, const OptTensor& t, int64_t num_heads) {
  if (!t) return nullptr;
  require_tensor(name, *t, {num_heads});
  require_dtype(name, *t, ScalarType::Float);
  return static_cast<const float*>(t->data_ptr());
}

}  // namespace attn_cpu
