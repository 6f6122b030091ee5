// File: tensor.h - views of K, V, Q and outputs that the caller owns.
//
// All tensors of the API are logically [B, H, S, D]: batch, heads, tokens, head_dim. Only D must be
// contiguous; the other strides are free, so a host's [S, H, D] rows need no copy.
#ifndef PALU_TENSOR_H_
#define PALU_TENSOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace palu {

enum class DType { kF32, kF16, kBF16 };

// Bytes of one element.
size_t DTypeBytes(DType dtype);
// "f32", "f16", "bf16".
const char* DTypeName(DType dtype);

// Read-only view. `stride` counts elements, not bytes; stride[3] must be 1.
struct ConstTensor {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  std::array<int64_t, 4> shape{};   // [B, H, S, D]
  std::array<int64_t, 4> stride{};  // elements

  // A dense [B, H, S, D] block.
  static ConstTensor Dense(const void* data, DType dtype, std::array<int64_t, 4> shape);
  // f32 rows as engines keep them: [S, H, D] dense, B = 1.
  static ConstTensor Rows(const float* data, int64_t tokens, int64_t heads, int64_t head_dim);
};

// The same, writable.
struct MutableTensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::array<int64_t, 4> shape{};
  std::array<int64_t, 4> stride{};

  static MutableTensor Dense(void* data, DType dtype, std::array<int64_t, 4> shape);
  static MutableTensor Rows(float* data, int64_t tokens, int64_t heads, int64_t head_dim);
};

// A dense tensor that owns its data; what Reconstruct and UpdateAndFetch return.
struct OwnedTensor {
  std::vector<std::byte> data;
  DType dtype = DType::kF32;
  std::array<int64_t, 4> shape{};  // [B, H, S, D]

  ConstTensor view() const { return ConstTensor::Dense(data.data(), dtype, shape); }
  const float* f32() const { return reinterpret_cast<const float*>(data.data()); }
};

}  // namespace palu

#endif  // PALU_TENSOR_H_
