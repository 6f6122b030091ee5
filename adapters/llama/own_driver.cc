// The driver whose KV cache is ours.
#include <algorithm>
#include <cstring>

#include "llama/driver.h"
#include "llama/hooks.h"
#include "llama/log.h"
#include "palu/errors.h"

namespace palu::llama {
namespace {

KVCacheConfig MakeConfig(const SessionOptions& options) {
  KVCacheConfig config = KVCacheConfig::Parse(options.cache);
  if (options.kv_memory > 0) {
    config.max_bytes =
        config.max_bytes > 0 ? std::min(config.max_bytes, options.kv_memory) : options.kv_memory;
  }
  return config;
}

ModelShape MakeShape(const Model::Impl& model, const SessionOptions& options) {
  ModelShape shape = model.shape;
  if (options.context > 0) shape.context = options.context;
  shape.threads = AttentionThreads(options.threads);
  return shape;
}

void CheckRopes(std::span<const LayerInfo> layers, const KVCacheConfig& config) {
  if (config.key_fit != KeyFit::kAveraged || !config.Encodes()) return;
  for (const LayerInfo& layer : layers) {
    if (!layer.rope && layer.shape.window == 0) {
      throw ConfigError(
          "key_fit=averaged needs to know how layer " + std::to_string(layer.shape.index) +
          " rotates its keys, which cannot be told for this model; allowed here: key_fit=prompt");
    }
  }
}

// Bits per element of K and V that a token will surely keep, for the prediction of memory; 0 = not
// known.
double CertainBits(const KVCacheConfig& config, const KVCache& cache) {
  if (config.method == "fp32") return 32;
  if (config.method == "fp16") return 16;
  if (cache.shape().window > 0) return config.EncodesWindows() ? config.windowed_bits : 16;
  const CacheStats stats = cache.Stats();
  return stats.encoded_tokens > 0 ? stats.code_bits : 0;
}

// Of f32 or f16 rows, with their own strides.
OwnedTensor DenseCopy(const ConstTensor& x) {
  OwnedTensor copy;
  copy.dtype = x.dtype;
  copy.shape = x.shape;
  const size_t element = DTypeBytes(x.dtype);
  const auto [batch, heads, tokens, dim] = x.shape;
  copy.data.resize(static_cast<size_t>(batch * heads * tokens * dim) * element);
  std::byte* to = copy.data.data();
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < tokens; ++t, to += dim * element) {
      const auto* from = static_cast<const std::byte*>(x.data) +
                         (h * x.stride[1] + t * x.stride[2]) * static_cast<int64_t>(element);
      std::memcpy(to, from, dim * element);
    }
  }
  return copy;
}

ConstTensor FirstRows(const OwnedTensor& x, int64_t rows) {
  ConstTensor view = x.view();
  view.shape[2] = rows;  // the strides stay
  return view;
}

class OwnDriver : public Driver {
 public:
  OwnDriver(const Model::Impl& model, const SessionOptions& options)
      : layers_(model.layers),
        config_(MakeConfig(options)),
        caches_(KVCacheBuilder::ForModel(MakeShape(model, options), config_)),
        hooks_(layers_, caches_),
        context_(model.model.get(), {.cells = options.ubatch,
                                     .ubatch = options.ubatch,
                                     .threads = ResolveThreads(options.threads),
                                     .callback = Hooks::Callback,
                                     .callback_data = &hooks_}) {
    CheckRopes(layers_, config_);
  }

  void Begin(int64_t position, int64_t tokens) override {
    saved_.clear();
    // A prompt is taken back by going back to these: forks share all pages, and nothing that the
    // prompt encodes or drops is lost. One token is taken back by Trim: a fork would cost a copy of
    // the window's last page per token.
    if (tokens == 1) return;
    CheckMemory(position + tokens);
    std::vector<KVCache> forks;
    forks.reserve(caches_.size());
    for (const KVCache& cache : caches_) forks.push_back(cache.Fork());
    saved_ = std::move(forks);
  }

  void Step(std::span<const Token> tokens, int64_t position, LogitRows rows) override {
    const ErrorLog log;
    hooks_.Begin(position, static_cast<int>(tokens.size()));
    const int code = context_.Decode(tokens, position, rows);
    context_.Clear();
    hooks_.End(code == 0);
    if (code != 0) ThrowDecodeError(code, log.suffix());
  }

  void Commit() override { saved_.clear(); }

  void Rollback(int64_t position) override {
    if (!saved_.empty()) {
      for (size_t i = 0; i < caches_.size(); ++i) caches_[i] = std::move(saved_[i]);
      saved_.clear();
      return;
    }
    for (KVCache& cache : caches_) {
      if (cache.size() > position) cache.Trim(cache.size() - position);
    }
  }

  void Trim(int64_t, int64_t n) override {
    // Windowed layers first: they are the ones that can refuse, and all of them do so alike.
    for (const bool windowed : {true, false}) {
      for (size_t i = 0; i < caches_.size(); ++i) {
        if ((layers_[i].shape.window > 0) == windowed) caches_[i].Trim(n);
      }
    }
  }

  void Clear() override {
    for (KVCache& cache : caches_) cache.Clear();
  }

  void Fill(std::span<const Token> piece, int64_t depth) override;

  SessionStats Stats(int64_t position) const override;
  std::string cache_text() const override { return config_.ToString(); }
  llama_context* context() const override { return context_.get(); }
  void SetObserver(KvObserver observer) override { hooks_.set_observer(std::move(observer)); }
  void SetQueryObserver(QueryObserver observer) override {
    hooks_.set_query_observer(std::move(observer));
  }
  std::span<const KVCache> caches() const override { return caches_; }

 private:
  // A prediction, so that a prompt that cannot fit is refused before anything is computed. It
  // counts only what is certain; the caches themselves throw at the limit.
  void CheckMemory(int64_t tokens) const {
    if (config_.max_bytes == 0) return;
    double bytes = 0;
    for (const KVCache& cache : caches_) {
      const LayerShape& shape = cache.shape();
      const int64_t kept = shape.window > 0 ? std::min<int64_t>(tokens, shape.window) : tokens;
      bytes += CertainBits(config_, cache) / 8 * static_cast<double>(kept) * shape.kv_heads *
               (shape.head_dim_k + shape.head_dim_v);
    }
    if (bytes <= static_cast<double>(config_.max_bytes)) return;
    throw MemoryError("the KV cache of " + std::to_string(tokens) + " tokens needs at least " +
                      std::to_string(static_cast<int64_t>(bytes)) + " bytes with " +
                      config_.method + "; the limit is " + std::to_string(config_.max_bytes));
  }

  const std::vector<LayerInfo>& layers_;
  KVCacheConfig config_;
  std::vector<KVCache> caches_;
  std::vector<KVCache> saved_;  // from Begin to Commit or Rollback, for a Decode of several tokens
  Hooks hooks_;
  Context context_;
};

void OwnDriver::Fill(std::span<const Token> piece, int64_t depth) {
  CheckMemory(depth);
  const auto n = static_cast<int64_t>(std::min<size_t>(piece.size(), depth));
  std::vector<OwnedTensor> keys(layers_.size()), values(layers_.size());  // of the piece
  const KvObserver before = hooks_.observer();
  hooks_.set_observer(
      [&](int layer, const ConstTensor& k, const ConstTensor& v, int64_t, const RopeParams&) {
        for (size_t i = 0; i < layers_.size(); ++i) {
          if (layers_[i].shape.index != layer) continue;
          keys[i] = DenseCopy(k);
          values[i] = DenseCopy(v);
        }
      });
  try {
    Step(piece.first(n), 0, LogitRows::kNone);
  } catch (...) {
    hooks_.set_observer(before);
    throw;
  }
  hooks_.set_observer(before);
  for (int64_t at = n; at < depth; at += n) {
    const int64_t rows = std::min(n, depth - at);
    for (size_t i = 0; i < caches_.size(); ++i) {
      const auto& rope = layers_[i].rope;
      caches_[i].Append(FirstRows(keys[i], rows), FirstRows(values[i], rows),
                        {.rope = rope ? &*rope : nullptr});
      caches_[i].Seal();
    }
  }
}

SessionStats OwnDriver::Stats(int64_t position) const {
  SessionStats stats;
  stats.tokens = position;
  double elements = 0;
  for (const KVCache& cache : caches_) {
    const CacheStats layer = cache.Stats();
    stats.kv_bytes += layer.nbytes;
    stats.kv_fp16_bytes += layer.fp16_bytes;
    stats.advertised_bits_per_element =
        std::max(stats.advertised_bits_per_element, layer.assigned_avg_bits);
    elements += static_cast<double>(layer.fp16_bytes) / 2;
    if (config_.HasBasis()) {
      stats.rank_k.push_back(layer.rank_k);
      stats.rank_v.push_back(layer.rank_v);
    }
    stats.layers.push_back(layer);
  }
  if (elements > 0)
    stats.stored_bits_per_element = static_cast<double>(stats.kv_bytes) * 8 / elements;
  return stats;
}

}  // namespace

std::unique_ptr<Driver> MakeOwnDriver(const Model::Impl& model, const SessionOptions& options) {
  return std::make_unique<OwnDriver>(model, options);
}

void ThrowDecodeError(int code, const std::string& log) {
  const std::string message =
      "llama.cpp failed to compute a batch (code " + std::to_string(code) + ")" + log;
  if (code == -2) throw MemoryError(message);
  throw StateError(message);
}

}  // namespace palu::llama
