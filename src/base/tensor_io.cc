#include "base/tensor_io.h"

#include <cstring>
#include <string>

#include "base/fp16.h"
#include "palu/errors.h"

namespace palu {
namespace {

// -1 stands for any size where it is what is expected.
std::string ShapeText(const std::array<int64_t, 4>& shape, bool expected) {
  std::string text = "[";
  for (int i = 0; i < 4; ++i)
    text += (i ? ", " : "") + (expected && shape[i] < 0 ? "any" : std::to_string(shape[i]));
  return text + "]";
}

void Check(const void* data, DType dtype, const std::array<int64_t, 4>& shape,
           const std::array<int64_t, 4>& stride, const char* name,
           const std::array<int64_t, 4>& expected) {
  bool same = true;
  for (int i = 0; i < 4; ++i) same &= expected[i] < 0 ? shape[i] >= 1 : shape[i] == expected[i];
  if (!same) {
    throw InputError(std::string(name) + " has shape " + ShapeText(shape, false) +
                     ", expected is " + ShapeText(expected, true));
  }
  if (!data) throw InputError(std::string(name) + " has no data");
  if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16) {
    throw InputError(std::string(name) + " has an unknown dtype; allowed are f32, f16 and bf16");
  }
  if (stride[3] != 1) {
    throw InputError(std::string(name) + " has stride " + std::to_string(stride[3]) +
                     " in its last dimension, allowed is 1");
  }
}

int64_t Offset(const std::array<int64_t, 4>& stride, int64_t b, int64_t h, int64_t t) {
  return b * stride[0] + h * stride[1] + t * stride[2];
}

}  // namespace

void CheckTensor(const ConstTensor& x, const char* name, const std::array<int64_t, 4>& shape) {
  Check(x.data, x.dtype, x.shape, x.stride, name, shape);
}

void CheckTensor(const MutableTensor& x, const char* name, const std::array<int64_t, 4>& shape) {
  Check(x.data, x.dtype, x.shape, x.stride, name, shape);
}

const float* RowOrNull(const ConstTensor& x, int64_t b, int64_t h, int64_t t) {
  if (x.dtype != DType::kF32) return nullptr;
  return static_cast<const float*>(x.data) + Offset(x.stride, b, h, t);
}

void ReadRow(const ConstTensor& x, int64_t b, int64_t h, int64_t t, float* out) {
  const int64_t n = x.shape[3];
  if (const float* row = RowOrNull(x, b, h, t)) {
    std::memcpy(out, row, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  const uint16_t* row = static_cast<const uint16_t*>(x.data) + Offset(x.stride, b, h, t);
  const bool half = x.dtype == DType::kF16;
  for (int64_t i = 0; i < n; ++i) out[i] = half ? F16ToF32(row[i]) : BF16ToF32(row[i]);
}

void WriteRow(const MutableTensor& x, int64_t b, int64_t h, int64_t t, const float* in) {
  const int64_t n = x.shape[3];
  const int64_t offset = Offset(x.stride, b, h, t);
  if (x.dtype == DType::kF32) {
    std::memcpy(static_cast<float*>(x.data) + offset, in, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  uint16_t* row = static_cast<uint16_t*>(x.data) + offset;
  const bool half = x.dtype == DType::kF16;
  for (int64_t i = 0; i < n; ++i) row[i] = half ? F32ToF16(in[i]) : F32ToBF16(in[i]);
}

}  // namespace palu
