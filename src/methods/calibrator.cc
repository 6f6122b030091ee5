// The public Calibrator: from tensors to the moments of a basis file.
#include <algorithm>
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

// Adds the rows of heads [heads.first, heads.last) of x side by side, un-rotated if rope.
void AddHeads(const ConstTensor& x, const HeadRange& heads, int64_t position,
              const RopeParams* rope, Moments& to) {
  const int64_t n = x.shape[2], dim = x.shape[3];
  std::vector<float> rows(static_cast<size_t>(n) * to.dim);
  for (int h = heads.first; h < heads.last; ++h) {
    float* const first = rows.data() + (h - heads.first) * dim;
    for (int64_t t = 0; t < n; ++t) ReadRow(x, 0, h, t, first + t * to.dim);
    if (rope) Unrotate(*rope, position, first, n, to.dim);
  }
  to.Add(rows.data(), n, to.dim);
}

std::string Name(int layer, const char* side) {
  return "layer " + std::to_string(layer) + ": " + side;
}

}  // namespace

Calibrator::Calibrator(const ModelShape& shape, std::string model, int joint_heads)
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
    const int joint = std::min(joint_heads, s.kv_heads);
    if (joint < 1 || joint * std::max(s.head_dim_k, s.head_dim_v) > 1024) {
      throw InputError("layer " + std::to_string(s.index) + ": " + std::to_string(joint_heads) +
                       " joint heads of " + std::to_string(s.head_dim_k) +
                       " dims; allowed are 1 or more heads of at most 1024 dims together");
    }
    LayerCalibration layer;
    layer.index = s.index, layer.heads = s.kv_heads, layer.window = s.window, layer.joint = joint;
    layer.dim_k = s.head_dim_k, layer.dim_v = s.head_dim_v;
    if (s.window == 0) layer.DivideHeads();
    for (const HeadRange& unit : layer.units) {
      layer.k.emplace_back((unit.last - unit.first) * s.head_dim_k);
      layer.v.emplace_back((unit.last - unit.first) * s.head_dim_v);
      for (int h = unit.first; h < unit.last; ++h) layer.q.emplace_back(s.head_dim_k);
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
  for (size_t u = 0; u < to.units.size(); ++u) {
    AddHeads(k, to.units[u], position, rope, to.k[u]);
    AddHeads(v, to.units[u], position, nullptr, to.v[u]);
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
  const int group = static_cast<int>(q.shape[1] / to.heads);
  for (int h = 0; h < static_cast<int>(to.q.size()); ++h) {
    for (int i = h * group; i < (h + 1) * group; ++i) {
      AddHeads(q, {i, i + 1}, position, rope, to.q[h]);
    }
  }
}

void Calibrator::SetCosts(int layer, double keys, double values) {
  if (!(keys > 0 && values > 0)) {
    throw InputError("layer " + std::to_string(layer) + ": costs of " + std::to_string(keys) +
                     " and " + std::to_string(values) + "; both must be above 0");
  }
  LayerCalibration& to = impl_->At(layer);
  to.cost_k = keys;
  to.cost_v = values;
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
