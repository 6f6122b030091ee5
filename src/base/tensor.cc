#include "palu/tensor.h"

namespace palu {

size_t DTypeBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
  }
  return "unknown";
}

namespace {

std::array<int64_t, 4> DenseStride(const std::array<int64_t, 4>& s) {
  return {s[1] * s[2] * s[3], s[2] * s[3], s[3], 1};
}

std::array<int64_t, 4> RowStride(int64_t tokens, int64_t heads, int64_t dim) {
  return {tokens * heads * dim, dim, heads * dim, 1};
}

}  // namespace

ConstTensor ConstTensor::Dense(const void* data, DType dtype, std::array<int64_t, 4> shape) {
  return {data, dtype, shape, DenseStride(shape)};
}

ConstTensor ConstTensor::Rows(const float* data, int64_t tokens, int64_t heads, int64_t head_dim) {
  return {data, DType::kF32, {1, heads, tokens, head_dim}, RowStride(tokens, heads, head_dim)};
}

MutableTensor MutableTensor::Dense(void* data, DType dtype, std::array<int64_t, 4> shape) {
  return {data, dtype, shape, DenseStride(shape)};
}

MutableTensor MutableTensor::Rows(float* data, int64_t tokens, int64_t heads, int64_t head_dim) {
  return {data, DType::kF32, {1, heads, tokens, head_dim}, RowStride(tokens, heads, head_dim)};
}

}  // namespace palu
