// KVCache: argument checks, then one Sequence per batch element.
#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include "base/tensor_io.h"
#include "base/threads.h"
#include "cache/attention.h"
#include "cache/kv_cache_impl.h"
#include "kernels/kernels.h"
#include "palu/builder.h"
#include "palu/errors.h"

namespace palu {
namespace {

OwnedTensor MakeTensor(DType dtype, std::array<int64_t, 4> shape) {
  OwnedTensor tensor;
  tensor.dtype = dtype;
  tensor.shape = shape;
  tensor.data.resize(static_cast<size_t>(shape[0] * shape[1] * shape[2] * shape[3]) *
                     DTypeBytes(dtype));
  return tensor;
}

}  // namespace

KVCache::KVCache(std::unique_ptr<KVCacheImpl> impl) : impl_(std::move(impl)) {}
KVCache::KVCache(KVCache&&) noexcept = default;
KVCache& KVCache::operator=(KVCache&&) noexcept = default;
KVCache::~KVCache() = default;

int64_t KVCache::size() const { return impl_->sequences[0].size(); }
const LayerShape& KVCache::shape() const { return impl_->context->shape; }
const KVCacheConfig& KVCache::config() const { return impl_->given; }

void KVCache::Append(const ConstTensor& k, const ConstTensor& v, const AppendArgs& args) {
  const LayerShape& s = shape();
  const int64_t batch = static_cast<int64_t>(impl_->sequences.size());
  const std::string where = "layer " + std::to_string(s.index) + ": ";
  CheckTensor(k, (where + "K").c_str(), {batch, s.kv_heads, -1, s.head_dim_k});
  CheckTensor(v, (where + "V").c_str(), {batch, s.kv_heads, k.shape[2], s.head_dim_v});
  for (int64_t b = 0; b < batch; ++b) impl_->sequences[b].CheckAppend(k, v, b, args);
  for (Sequence& sequence : impl_->sequences) sequence.DropOutsideWindow();
  Seal();
  // Memory may still run out halfway through a batch: take back what the earlier sequences got.
  for (int64_t b = 0; b < batch; ++b) {
    try {
      impl_->sequences[b].Append(k, v, b, args);
    } catch (...) {
      for (int64_t done = 0; done < b; ++done) {
        impl_->sequences[done].Trim(k.shape[2], std::nullopt);
      }
      throw;
    }
  }
}

void KVCache::Attend(const AttendArgs& args, const MutableTensor& out) const {
  const LayerShape& s = shape();
  const int64_t batch = static_cast<int64_t>(impl_->sequences.size());
  const std::string where = "layer " + std::to_string(s.index) + ": ";
  CheckTensor(args.q, (where + "Q").c_str(), {batch, -1, -1, s.head_dim_k});
  CheckTensor(out, (where + "the output").c_str(),
              {batch, args.q.shape[1], args.q.shape[2], s.head_dim_v});
  if (args.q.shape[1] % s.kv_heads != 0) {
    throw InputError(where + "Q has " + std::to_string(args.q.shape[1]) +
                     " heads; allowed are multiples of the " + std::to_string(s.kv_heads) +
                     " KV heads");
  }
  if (size() == 0) throw StateError(where + "attention over an empty cache; append tokens first");
  if (args.q.shape[2] > size()) {
    throw InputError(where + "Q has " + std::to_string(args.q.shape[2]) +
                     " tokens, the cache holds " + std::to_string(size()) +
                     "; queries are its last tokens");
  }
  if (!std::isfinite(args.scale)) throw InputError(where + "scale must be finite");
  if (!(args.soft_cap >= 0)) throw InputError(where + "soft_cap must be at least 0");
  if (args.mask && args.mask_stride != 0 && args.mask_stride < size()) {
    throw InputError(where + "mask_stride is " + std::to_string(args.mask_stride) +
                     "; it must be 0 or at least " + std::to_string(size()));
  }
  for (int64_t b = 0; b < batch; ++b) AttendSequence(impl_->sequences[b], args, b, out);
}

void KVCache::Seal() {
  std::vector<Sequence>& sequences = impl_->sequences;
  std::vector<char> fitted;
  try {
    for (Sequence& sequence : sequences) fitted.push_back(sequence.PrepareSeal());
  } catch (...) {
    for (size_t b = 0; b < fitted.size(); ++b) sequences[b].AbandonSeal(fitted[b]);
    throw;
  }
  for (Sequence& sequence : sequences) sequence.Seal();
}

KVCache::KV KVCache::Reconstruct(DType dtype) const {
  const LayerShape& s = shape();
  const int64_t batch = static_cast<int64_t>(impl_->sequences.size()), n = size();
  KV kv{MakeTensor(dtype, {batch, s.kv_heads, n, s.head_dim_k}),
        MakeTensor(dtype, {batch, s.kv_heads, n, s.head_dim_v})};
  const MutableTensor k = MutableTensor::Dense(kv.k.data.data(), dtype, kv.k.shape);
  const MutableTensor v = MutableTensor::Dense(kv.v.data.data(), dtype, kv.v.shape);
  constexpr int64_t kRows = 256;  // at a time
  std::vector<float> k_rows(static_cast<size_t>(kRows) * s.head_dim_k),
      v_rows(static_cast<size_t>(kRows) * s.head_dim_v);
  for (int64_t b = 0; b < batch; ++b) {
    for (int h = 0; h < s.kv_heads; ++h) {
      for (int64_t t = 0; t < n; t += kRows) {
        const int64_t count = std::min(kRows, n - t);
        impl_->sequences[b].Decode(h, t, count, k_rows.data(), v_rows.data());
        for (int64_t i = 0; i < count; ++i) {
          WriteRow(k, b, h, t + i, k_rows.data() + i * s.head_dim_k);
          WriteRow(v, b, h, t + i, v_rows.data() + i * s.head_dim_v);
        }
      }
    }
  }
  return kv;
}

KVCache::KV KVCache::UpdateAndFetch(const ConstTensor& k, const ConstTensor& v,
                                    const AppendArgs& args) {
  Append(k, v, args);
  Seal();
  return Reconstruct(k.dtype);
}

void KVCache::Trim(int64_t n) {
  std::vector<Sequence>& sequences = impl_->sequences;
  std::vector<std::optional<PageStore>> windows;
  for (const Sequence& sequence : sequences) windows.push_back(sequence.PrepareTrim(n));
  for (size_t b = 0; b < sequences.size(); ++b) sequences[b].Trim(n, std::move(windows[b]));
}

void KVCache::Clear() {
  for (Sequence& sequence : impl_->sequences) sequence.Clear();
}

KVCache KVCache::Fork() const { return KVCache(std::make_unique<KVCacheImpl>(*impl_)); }

int64_t KVCache::nbytes() const {
  int64_t bytes = impl_->shared_basis_bytes();
  for (const Sequence& sequence : impl_->sequences) bytes += sequence.nbytes();
  return bytes;
}

CacheStats KVCache::Stats() const {
  const LayerShape& s = shape();
  const double batch = static_cast<double>(impl_->sequences.size());
  CacheStats stats;
  for (const Sequence& sequence : impl_->sequences) sequence.AddTo(stats);
  stats.basis_bytes += impl_->shared_basis_bytes();
  stats.nbytes += impl_->shared_basis_bytes();
  stats.tokens = size();
  stats.encoded_tokens = static_cast<int64_t>(stats.encoded_tokens / batch);
  stats.exact_tokens = static_cast<int64_t>(stats.exact_tokens / batch);
  stats.residual_energy_k /= batch;
  stats.residual_energy_v /= batch;
  // A layer with a window needs no more tokens, in fp16 either.
  const int64_t needed = s.window > 0 ? std::min<int64_t>(size(), s.window) : size();
  const double elements =
      batch * static_cast<double>(needed) * s.kv_heads * (s.head_dim_k + s.head_dim_v);
  stats.fp16_bytes = static_cast<int64_t>(elements * 2);
  stats.stored_bits_per_element =
      elements > 0 ? static_cast<double>(stats.nbytes) * 8 / elements : 0;
  // Every sequence has a basis of its own.
  for (const Sequence& sequence : impl_->sequences) {
    const LayerCodec* codec = sequence.codec();
    if (!codec) continue;
    stats.rank_k = std::max(stats.rank_k, codec->k.basis_rank());
    stats.rank_v = std::max(stats.rank_v, codec->v.basis_rank());
    stats.assigned_avg_bits =
        std::max({stats.assigned_avg_bits, codec->k.CodeBits(), codec->v.CodeBits()});
    stats.code_bits += (codec->k.StoredBits() + codec->v.StoredBits()) / 2 / batch;
  }
  if (!impl_->context->method->encodes()) {
    stats.assigned_avg_bits = stats.code_bits =
        impl_->context->method->window_codec() == Codec::kF32 ? 32 : 16;
  }
  return stats;
}

// ------------------------------------------------------------------------------------------------
// builder

ModelShape ModelShape::Uniform(int n_layers, int kv_heads, int head_dim) {
  ModelShape shape;
  for (int i = 0; i < n_layers; ++i) shape.layers.push_back({i, kv_heads, head_dim, head_dim, 0});
  return shape;
}

namespace {

void CheckShape(const ModelShape& shape) {
  auto require = [](bool ok, const std::string& what, int64_t value, const char* allowed) {
    if (!ok) throw InputError(what + " is " + std::to_string(value) + "; allowed is " + allowed);
  };
  require(!shape.layers.empty(), "the number of layers", 0, "at least 1");
  require(shape.batch >= 1, "batch", shape.batch, "at least 1");
  require(shape.context >= 0, "context", shape.context, "0 (32768) or more");
  require(shape.threads >= 0 && shape.threads <= 1024, "threads", shape.threads, "0 (all) to 1024");
  for (const LayerShape& layer : shape.layers) {
    const std::string where = "layer " + std::to_string(layer.index) + ": ";
    require(layer.kv_heads >= 1, where + "kv_heads", layer.kv_heads, "at least 1");
    require(layer.head_dim_k >= 1 && layer.head_dim_k <= kMaxRank, where + "head_dim_k",
            layer.head_dim_k, "1 to 1024");
    require(layer.head_dim_v >= 1 && layer.head_dim_v <= kMaxRank, where + "head_dim_v",
            layer.head_dim_v, "1 to 1024");
    require(layer.window >= 0, where + "window", layer.window, "0 (none) or more");
  }
}

// The basis file that the config names, checked against the model; nothing if it names none.
std::optional<Calibration> OpenBasis(const ModelShape& shape, const KVCacheConfig& config) {
  if (config.basis != BasisKind::kFile) return std::nullopt;
  Calibration basis = LoadCalibration(config.basis_file);
  auto refuse = [&](const std::string& has, const std::string& needs) {
    throw FormatError("the basis file " + config.basis_file + " " + has + "; the model " + needs +
                      ". Write one for this model with `palu fit`");
  };
  if (!shape.model.empty() && basis.model != shape.model) {
    refuse("is of the model '" + basis.model + "'", "is '" + shape.model + "'");
  }
  if (basis.layers.size() != shape.layers.size()) {
    refuse("has " + std::to_string(basis.layers.size()) + " layers",
           "has " + std::to_string(shape.layers.size()));
  }
  auto text = [](int heads, int dim_k, int dim_v, int window) {
    return std::to_string(heads) + " KV heads of " + std::to_string(dim_k) + " and " +
           std::to_string(dim_v) + " dims" +
           (window > 0 ? " in a window of " + std::to_string(window) : "");
  };
  for (const LayerShape& s : shape.layers) {
    const LayerCalibration* layer = basis.Find(s.index);
    const std::string name = "layer " + std::to_string(s.index);
    if (!layer) {
      refuse("has no " + name, "has one");
    } else if (layer->heads != s.kv_heads || layer->dim_k != s.head_dim_k ||
               layer->dim_v != s.head_dim_v || (layer->window > 0) != (s.window > 0)) {
      refuse("has " + text(layer->heads, layer->dim_k, layer->dim_v, layer->window) + " in " + name,
             "has " + text(s.kv_heads, s.head_dim_k, s.head_dim_v, s.window));
    }
    const int joint = std::min(config.joint_heads, s.kv_heads);
    if (layer && s.window == 0 && joint > 1 && joint != layer->joint) {
      throw FormatError("the basis file " + config.basis_file + " joins " +
                        std::to_string(layer->joint) + " heads, joint_heads asks for " +
                        std::to_string(joint) + "; write one with `palu fit --joint-heads " +
                        std::to_string(config.joint_heads) + "`, or use joint_heads=1");
    }
  }
  return basis;
}

// Bits of every layer: shared by what the layers cost where that is known and asked for.
std::vector<SideBits> LayerBudgets(const ModelShape& shape, const KVCacheConfig& config,
                                   const std::optional<Calibration>& basis) {
  std::vector<SideBits> bits;
  for (const LayerShape& s : shape.layers) {
    bits.push_back(EqualBits(config, s.head_dim_k, s.head_dim_v));
  }
  if (!basis || !basis->has_costs() || config.budgets == Budgets::kEqual ||
      config.only.layer >= 0) {
    return bits;
  }
  std::vector<SideCost> sides;
  for (const LayerShape& s : shape.layers) {
    if (s.window > 0) continue;
    const LayerCalibration& layer = *basis->Find(s.index);
    sides.push_back({layer.cost_k, static_cast<double>(s.kv_heads) * s.head_dim_k});
    sides.push_back({layer.cost_v, static_cast<double>(s.kv_heads) * s.head_dim_v});
  }
  const std::vector<double> shared = ShareBits(sides, config.auto_bits);
  size_t next = 0;
  for (size_t i = 0; i < bits.size(); ++i) {
    if (shape.layers[i].window > 0) continue;
    bits[i] = {shared[next], shared[next + 1]};
    next += 2;
  }
  return bits;
}

std::shared_ptr<const LayerContext> MakeContext(const ModelShape& shape, const LayerShape& layer,
                                                const KVCacheConfig& given,
                                                const std::optional<Calibration>& basis,
                                                SideBits bits, const MemoryAccountPtr& account) {
  const MethodRow* method = &FindMethod(given.method);
  KVCacheConfig config = given;
  const bool other = given.only.layer >= 0 && given.only.layer != layer.index;
  // More recent tokens than a page bring nothing at 8 bits; where a window shows no other, none
  // would ever be packed.
  const int recent = std::min(given.recent_tokens, kBlockTokens);
  if (layer.window > recent && given.EncodesWindows()) {
    method = &WindowedMethod();
    config = DefaultConfig(*method);
    config.scales = given.scales;
    config.recent_tokens = recent;
    config.fit_tokens = recent + kBlockTokens;  // the first page
  } else if ((layer.window > 0 || other) && method->encodes()) {
    method = &FindMethod("fp16");
  }
  if (!method->encodes()) config.sink_tokens = config.recent_tokens = 0;
  auto context = std::make_shared<LayerContext>(layer, config, method);
  context->positions = shape.context > 0 ? shape.context : 32768;
  context->fit_tokens =
      config.fit_tokens >= 0 ? config.fit_tokens : 8 * std::max(layer.head_dim_k, layer.head_dim_v);
  context->threads = ResolveThreads(shape.threads);
  context->account = account;
  context->bits = bits;
  if (basis && method->encodes() && layer.window == 0) {
    context->calibration = std::make_shared<CalibratedCodec>(*basis->Find(layer.index));
  }
  return context;
}

}  // namespace

namespace {

// Options against one layer: ranks and joint channels.
void CheckOptions(const KVCacheConfig& config, const LayerShape& layer) {
  const int joint = std::min(config.joint_heads, layer.kv_heads);
  config.ValidateFor(joint * std::min(layer.head_dim_k, layer.head_dim_v));
  if (joint * std::max(layer.head_dim_k, layer.head_dim_v) > kMaxRank) {
    throw ConfigError("option joint_heads=" + std::to_string(config.joint_heads) +
                      " is not allowed for heads of " +
                      std::to_string(std::max(layer.head_dim_k, layer.head_dim_v)) +
                      " dims; together they may have at most " + std::to_string(kMaxRank));
  }
}

}  // namespace

std::vector<KVCache> KVCacheBuilder::ForModel(const ModelShape& shape,
                                              const KVCacheConfig& config) {
  CheckShape(shape);
  for (const LayerShape& layer : shape.layers) CheckOptions(config, layer);
  Active();  // a wrong PALU_TARGET is reported here, not at the first token
  const std::optional<Calibration> basis = OpenBasis(shape, config);
  const auto account = std::make_shared<MemoryAccount>(config.max_bytes);
  const std::vector<SideBits> bits = LayerBudgets(shape, config, basis);
  std::vector<KVCache> caches;
  for (size_t i = 0; i < shape.layers.size(); ++i) {
    const LayerShape& layer = shape.layers[i];
    auto impl = std::make_unique<KVCacheImpl>();
    impl->given = config;
    impl->context = MakeContext(shape, layer, config, basis, bits[i], account);
    for (int b = 0; b < shape.batch; ++b) impl->sequences.emplace_back(impl->context);
    caches.push_back(KVCache(std::move(impl)));
  }
  return caches;
}

int64_t KVCacheBuilder::EstimateBytes(const ModelShape& shape, const KVCacheConfig& config,
                                      int64_t tokens) {
  KVCacheConfig unlimited = config;
  unlimited.max_bytes = 0;
  unlimited.energy_threshold = 1;
  // Most layers of a model are alike.
  using Size = std::tuple<int, int, int, int, double, double>;
  std::map<Size, int64_t> layers;
  int64_t bytes = 0;
  for (const KVCache& cache : ForModel(shape, unlimited)) {
    const LayerContext& context = *cache.impl_->context;
    const LayerShape& s = context.shape;
    const Size size{s.kv_heads, s.head_dim_k,   s.head_dim_v,
                    s.window,   context.bits.k, context.bits.v};
    // `only` gives layers of one size methods of their own.
    const auto known = config.only.layer < 0 ? layers.find(size) : layers.end();
    const int64_t layer =
        known != layers.end() ? known->second : EstimateLayerBytes(context, tokens);
    layers[size] = layer;
    bytes += shape.batch * layer;
  }
  return bytes;
}

MemoryReport KVCacheBuilder::Memory(const KVCache& cache) {
  const MemoryAccount& account = *cache.impl_->context->account;
  return {account.allocated(), account.peak(), account.limit()};
}

}  // namespace palu
