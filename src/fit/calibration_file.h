// File: calibration_file.h - the content of a basis file: moments of every layer, and their bytes.
//
// Layout, little endian:
//   "PALUBASE", u32 version, u32 length of the model's name, the name,
//   u32 layers, then per layer
//     i32 index, heads, dim_k, dim_v, window; f64 tokens
//     per head: K, V, Q, each f32 mean[D], then f32 covariance[D (D + 1) / 2], rows of the upper
//     half (Q has no mean: its raw second moment, over all query heads of the KV head)
//   u64 FNV-1a of all bytes before.
// Layers with a window have no moments.
#ifndef PALU_SRC_FIT_CALIBRATION_FILE_H_
#define PALU_SRC_FIT_CALIBRATION_FILE_H_

#include <string>
#include <vector>

#include "fit/moments.h"

namespace palu {

struct LayerCalibration {
  int index = 0, heads = 0, dim_k = 0, dim_v = 0, window = 0;
  std::vector<Moments> k, v, q;  // [heads]; k and q un-rotated
};

struct Calibration {
  std::string model;
  std::vector<LayerCalibration> layers;

  // Null if there is none.
  const LayerCalibration* Find(int index) const;
};

// Errors: FormatError (missing, truncated, foreign or damaged file, unknown version).
Calibration LoadCalibration(const std::string& path);
// Errors: FormatError; an old file stays as it was.
void SaveCalibration(const Calibration& calibration, const std::string& path);

}  // namespace palu

#endif  // PALU_SRC_FIT_CALIBRATION_FILE_H_
