// File: calibration_file.h - the content of a basis file: moments of every layer, and their bytes.
//
// Layout, little endian:
//   "PALUBASE", u32 version, u32 length of the model's name, the name,
//   u32 layers, then per layer
//     i32 index, heads, dim_k, dim_v, window, joint; f64 tokens; f32 cost of keys, of values
//     per unit of `joint` heads (HeadGroups divides them): K, V, then per head Q, each
//     f32 mean[D], then f32 covariance[D (D + 1) / 2], rows of the upper half; D = all dims of the
//     unit (Q has no mean: its raw second moment, over all query heads of the KV head)
//   u64 FNV-1a of all bytes before.
// Layers with a window have no moments.
#ifndef PALU_SRC_FIT_CALIBRATION_FILE_H_
#define PALU_SRC_FIT_CALIBRATION_FILE_H_

#include <string>
#include <vector>

#include "fit/moments.h"
#include "palu/spectrum.h"

namespace palu {

struct LayerCalibration {
  int index = 0, heads = 0, dim_k = 0, dim_v = 0, window = 0;
  int joint = 1;                  // heads whose moments are joint
  double cost_k = 0, cost_v = 0;  // KL when this side alone is encoded at 2 bits; 0 = not measured
  std::vector<HeadRange> units;   // of the heads
  std::vector<Moments> k, v;      // [units]; k un-rotated
  std::vector<Moments> q;         // [heads]; un-rotated

  void DivideHeads();  // makes units
  // Of a unit of the file, or of a single head. Queries of several heads do not meet.
  Moments Keys(const HeadRange& unit) const { return Of(unit, k, dim_k); }
  Moments Values(const HeadRange& unit) const { return Of(unit, v, dim_v); }
  Moments Queries(const HeadRange& unit) const;

 private:
  Moments Of(const HeadRange& unit, const std::vector<Moments>& side, int dim) const;
};

struct Calibration {
  std::string model;
  std::vector<LayerCalibration> layers;

  // Costs of all sides are known.
  bool has_costs() const;
  // Null if there is none.
  const LayerCalibration* Find(int index) const;
};

// Errors: FormatError (missing, truncated, foreign or damaged file, unknown version).
Calibration LoadCalibration(const std::string& path);
// Errors: FormatError; an old file stays as it was.
void SaveCalibration(const Calibration& calibration, const std::string& path);

}  // namespace palu

#endif  // PALU_SRC_FIT_CALIBRATION_FILE_H_
