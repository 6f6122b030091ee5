// File: calibration.h - statistics of a model's keys, values and queries over a text, kept in a
// file: a basis without a prompt.
//
//   palu::Calibrator calibrator(shape, "SmolLM2 135M");
//   calibrator.AddKeysValues(layer, k, v, position, &rope);   // for every batch of the text
//   calibrator.AddQueries(layer, q, position, &rope);
//   calibrator.Save("model.basis");                           // then --cache
//   palu:basis=model.basis
//
// The file holds means and covariances of un-rotated keys, of values and of un-rotated queries, not
// bases: every option of the method (groups, ranks, bits, the context that keys are averaged over)
// still applies when a cache opens it.
#ifndef PALU_CALIBRATION_H_
#define PALU_CALIBRATION_H_

#include <cstdint>
#include <memory>
#include <string>

#include "palu/builder.h"
#include "palu/rope.h"
#include "palu/tensor.h"

namespace palu {

// Threads: one at a time.
// Memory: H * (Dk^2 + Dv^2 + Dk^2) doubles per layer, those of K and V times joint_heads.
class Calibrator {
 public:
  // `model` names the model in the file; a cache of another model refuses the file. joint_heads: of
  // the caches that will open it; they may always use 1. Errors: InputError (shape out of range).
  Calibrator(const ModelShape& shape, std::string model, int joint_heads = 1);
  ~Calibrator();

  // k, v: [1, H, n, D], keys after RoPE; `layer` is LayerShape::index. Layers with a sliding window
  // are passed over: they stay exact. rope null: keys are not rotated. Errors: InputError.
  void AddKeysValues(int layer, const ConstTensor& k, const ConstTensor& v, int64_t position,
                     const RopeParams* rope);
  // q: [1, Hq, n, Dk], after RoPE, unscaled. Errors: InputError.
  void AddQueries(int layer, const ConstTensor& q, int64_t position, const RopeParams* rope);
  // What a layer costs: the divergence of the model's predictions when only its keys, or only its
  // values, are encoded at 2 bits. With the costs of all layers bits=auto shares its budget among
  // them. Errors: InputError (not above 0).
  void SetCosts(int layer, double keys, double values);
  // Writes the file beside its name first, so that a failure leaves an old file as it was.
  // Errors: StateError (a layer has fewer than 2 tokens, or keys without queries), FormatError
  // (cannot be written, disk full).
  void Save(const std::string& path) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace palu

#endif  // PALU_CALIBRATION_H_
