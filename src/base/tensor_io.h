// File: tensor_io.h - checked access to the caller's tensors, one row at a time.
#ifndef PALU_SRC_BASE_TENSOR_IO_H_
#define PALU_SRC_BASE_TENSOR_IO_H_

#include <array>
#include <cstdint>

#include "palu/tensor.h"

namespace palu {

// Throws InputError unless the view has this shape (-1: any size of at least 1), data and a
// contiguous last dim.
void CheckTensor(const ConstTensor& x, const char* name, const std::array<int64_t, 4>& shape);
void CheckTensor(const MutableTensor& x, const char* name, const std::array<int64_t, 4>& shape);

// x[b, h, t, :] as f32; `out` gets shape[3] values.
void ReadRow(const ConstTensor& x, int64_t b, int64_t h, int64_t t, float* out);
// The row itself when it is f32 already, otherwise null.
const float* RowOrNull(const ConstTensor& x, int64_t b, int64_t h, int64_t t);
// in: shape[3] values, rounded to the view's dtype.
void WriteRow(const MutableTensor& x, int64_t b, int64_t h, int64_t t, const float* in);

}  // namespace palu

#endif  // PALU_SRC_BASE_TENSOR_IO_H_
