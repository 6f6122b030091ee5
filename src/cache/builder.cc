// From a model's shape and the options to the caches of its layers.
#include "palu/builder.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include "base/threads.h"
#include "cache/cells.h"
#include "cache/kv_cache_impl.h"
#include "kernels/kernels.h"
#include "palu/errors.h"

namespace palu {

ModelShape ModelShape::Uniform(int n_layers, int kv_heads, int head_dim) {
  ModelShape shape;
  for (int i = 0; i < n_layers; ++i) shape.layers.push_back({i, kv_heads, head_dim, head_dim, 0});
  return shape;
}

namespace {

// Tokens that the cells of many sequences are fitted on (docs/decisions/0008-epochs.md).
constexpr int64_t kMostCellsToFit = 2048;

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
  if (!shape.partial && basis.layers.size() != shape.layers.size()) {
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

std::shared_ptr<LayerContext> MakeContext(const ModelShape& shape, const LayerShape& layer,
                                          const KVCacheConfig& given,
                                          const std::optional<Calibration>& basis, SideBits bits,
                                          const MemoryAccountPtr& account) {
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

std::vector<std::shared_ptr<LayerContext>> MakeContexts(const ModelShape& shape,
                                                        const KVCacheConfig& config) {
  CheckShape(shape);
  for (const LayerShape& layer : shape.layers) CheckOptions(config, layer);
  Active();  // a wrong PALU_TARGET is reported here, not at the first token
  const std::optional<Calibration> basis = OpenBasis(shape, config);
  const auto account = std::make_shared<MemoryAccount>(config.max_bytes);
  const std::vector<SideBits> bits = LayerBudgets(shape, config, basis);
  std::vector<std::shared_ptr<LayerContext>> contexts;
  for (size_t i = 0; i < shape.layers.size(); ++i) {
    contexts.push_back(MakeContext(shape, shape.layers[i], config, basis, bits[i], account));
  }
  return contexts;
}

}  // namespace

std::vector<KVCache> KVCacheBuilder::ForModel(const ModelShape& shape,
                                              const KVCacheConfig& config) {
  std::vector<KVCache> caches;
  for (const auto& context : MakeContexts(shape, config)) {
    auto impl = std::make_unique<KVCacheImpl>();
    impl->given = config;
    impl->context = context;
    for (int b = 0; b < shape.batch; ++b) impl->sequences.emplace_back(context);
    caches.push_back(KVCache(std::move(impl)));
  }
  return caches;
}

std::vector<CellCache> KVCacheBuilder::CellsForModel(const ModelShape& shape,
                                                     const KVCacheConfig& config, int64_t cells,
                                                     int streams) {
  if (shape.batch != 1 || cells < 1 || streams < 1) {
    throw InputError("cells for batch " + std::to_string(shape.batch) + ", " +
                     std::to_string(cells) + " cells and " + std::to_string(streams) +
                     " streams; allowed are batch 1, and 1 or more of the others");
  }
  std::vector<CellCache> caches;
  for (const auto& context : MakeContexts(shape, config)) {
    if (config.fit_tokens < 0 && !context->windowed()) {
      // Who asks first need not be like those who ask later: a larger sample, where there is room.
      const int64_t room = std::min(kMostCellsToFit, cells * streams / 4);
      context->fit_tokens = std::max(context->fit_tokens, room);
    }
    caches.push_back(CellCache(std::make_unique<Cells>(context, cells, streams)));
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

namespace {

MemoryReport Report(const MemoryAccount& account) {
  return {account.allocated(), account.peak(), account.limit()};
}

}  // namespace

MemoryReport KVCacheBuilder::Memory(const KVCache& cache) {
  return Report(*cache.impl_->context->account);
}

MemoryReport KVCacheBuilder::Memory(const CellCache& cache) {
  return Report(*cache.cells_->context().account);
}

}  // namespace palu
