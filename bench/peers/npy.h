// File: npy.h - dense tensors in NumPy's .npy files.
#ifndef PALU_BENCH_PEERS_NPY_H_
#define PALU_BENCH_PEERS_NPY_H_

#include <filesystem>

#include "palu/tensor.h"

namespace palu::peers {

// Writes [B, H, S, D] in f32 or f16, row-major. Errors: FormatError (cannot be written),
// InputError (bf16, which NumPy has not).
void WriteNpy(const std::filesystem::path& path, const OwnedTensor& tensor);

// Reads what WriteNpy wrote. Errors: FormatError (missing, truncated, another dtype or another
// number of dimensions; the file is named).
OwnedTensor ReadNpy(const std::filesystem::path& path);

}  // namespace palu::peers

#endif  // PALU_BENCH_PEERS_NPY_H_
