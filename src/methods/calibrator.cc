// The public Calibrator: from tensors to the moments of a basis file.
#include <utility>

#include "base/tensor_io.h"
#include "fit/calibration_file.h"
#include "palu/calibration.h"
#include "palu/errors.h"

namespace palu {

struct Calibrator::Impl {
  Calibration calibration;

  LayerCalibration& At(int index) {
    for (LayerCalibration& layer : calibration.layers) {
      if (layer.index == index) return layer;
    }
    throw InputError("layer " + std::to_string(index) + " is not in the calibrator's shape");
  }
};

namespace {

// Adds the rows of head h of x, un-rotated if rope.
void AddHead(const ConstTensor& x, int64_t h, int64_t position, const RopeParams* rope,
             Moments& to) {
  const int64_t n = x.shape[2];
  const int dim = to.dim;
  std::vector<float> rows(static_cast<size_t>(n) * dim);
  for (int64_t t = 0; t < n; ++t) ReadRow(x, 0, h, t, rows.data() + t * dim);
  if (rope) Unrotate(*rope, position, rows.data(), n, dim);
  to.Add(rows.data(), n, dim);
}

std::string Name(int layer, const char* side) {
  return "layer " + std::to_string(layer) + ": " + side;
}

}  // namespace

Calibrator::Calibrator(const ModelShape& shape, std::string model)
    : impl_(std::make_unique<Impl>()) {
  impl_->calibration.model = std::move(model);
  for (const LayerShape& s : shape.layers) {
    if (s.kv_heads < 1 || s.head_dim_k < 1 || s.head_dim_v < 1 || s.head_dim_k > 1024 ||
        s.head_dim_v > 1024) {
      throw InputError("layer " + std::to_string(s.index) + " has " + std::to_string(s.kv_heads) +
                       " KV heads of " + std::to_string(s.head_dim_k) + " and " +
                       std::to_string(s.head_dim_v) +
                       " dims; allowed are at least 1 head and 1 to 1024 dims");
    }
    LayerCalibration layer{s.index, s.kv_heads, s.head_dim_k, s.head_dim_v, s.window, {}, {}, {}};
    for (int h = 0; s.window == 0 && h < s.kv_heads; ++h) {
      layer.k.emplace_back(s.head_dim_k);
      layer.v.emplace_back(s.head_dim_v);
      layer.q.emplace_back(s.head_dim_k);
    }
    impl_->calibration.layers.push_back(std::move(layer));
  }
}

Calibrator::~Calibrator() = default;

void Calibrator::AddKeysValues(int layer, const ConstTensor& k, const ConstTensor& v,
                               int64_t position, const RopeParams* rope) {
  LayerCalibration& to = impl_->At(layer);
  CheckTensor(k, Name(layer, "K").c_str(), {1, to.heads, -1, to.dim_k});
  CheckTensor(v, Name(layer, "V").c_str(), {1, to.heads, k.shape[2], to.dim_v});
  for (size_t h = 0; h < to.k.size(); ++h) {
    AddHead(k, static_cast<int64_t>(h), position, rope, to.k[h]);
    AddHead(v, static_cast<int64_t>(h), position, nullptr, to.v[h]);
  }
}

void Calibrator::AddQueries(int layer, const ConstTensor& q, int64_t position,
                            const RopeParams* rope) {
  LayerCalibration& to = impl_->At(layer);
  CheckTensor(q, Name(layer, "Q").c_str(), {1, -1, -1, to.dim_k});
  if (q.shape[1] % to.heads != 0) {
    throw InputError(Name(layer, "Q") + " has " + std::to_string(q.shape[1]) +
                     " heads; allowed are multiples of the " + std::to_string(to.heads) +
                     " KV heads");
  }
  const int64_t group = q.shape[1] / to.heads;
  for (size_t h = 0; h < to.q.size(); ++h) {
    for (int64_t i = 0; i < group; ++i) {
      AddHead(q, static_cast<int64_t>(h) * group + i, position, rope, to.q[h]);
    }
  }
}

void Calibrator::Save(const std::string& path) const {
  for (const LayerCalibration& layer : impl_->calibration.layers) {
    if (layer.window > 0) continue;
    if (layer.k[0].rows < 2 || layer.q[0].rows < 1) {
      throw StateError("layer " + std::to_string(layer.index) + " has seen " +
                       std::to_string(static_cast<int64_t>(layer.k[0].rows)) + " keys and " +
                       std::to_string(static_cast<int64_t>(layer.q[0].rows)) +
                       " queries; a basis needs at least 2 keys and their queries");
    }
  }
  SaveCalibration(impl_->calibration, path);
}

}  // namespace palu
