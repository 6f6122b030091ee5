#include "bench/attention_cache.h"

#include <fmt/format.h>

#include <algorithm>

#include "llama/ggml_attention.h"
#include "palu/palu.h"

namespace palu::app {
namespace {

constexpr int64_t kLeastContext = 32768;  // that keys are averaged over

bool IsLlama(const std::string& cache) { return cache.starts_with("llama:"); }

ModelShape ShapeOf(const AttentionShape& shape, int64_t tokens, int layers, int threads) {
  ModelShape model = ModelShape::Uniform(layers, shape.kv_heads, shape.head_dim);
  model.context = std::max(tokens, kLeastContext);
  model.threads = threads;
  return model;
}

llama::GgmlAttentionOptions GgmlOptions(const std::string& cache, const AttentionShape& shape,
                                        int64_t tokens, int layers, int threads) {
  return {.cache = cache,
          .query_heads = shape.query_heads,
          .kv_heads = shape.kv_heads,
          .head_dim = shape.head_dim,
          .tokens = tokens,
          .layers = layers,
          .threads = threads};
}

class OwnCache : public AttentionCache {
 public:
  OwnCache(const std::string& cache, const AttentionShape& shape, int64_t tokens, int layers,
           int threads)
      : shape_(shape),
        config_(KVCacheConfig::Parse(cache)),
        layers_(KVCacheBuilder::ForModel(ShapeOf(shape, tokens, layers, threads), config_)) {}

  void Append(const SyntheticTokens& tokens, int64_t, int n, bool last) override {
    const std::array<int64_t, 4> shape = {1, shape_.kv_heads, n, shape_.head_dim};
    const auto k = ConstTensor::Dense(tokens.keys().data(), DType::kF32, shape);
    const auto v = ConstTensor::Dense(tokens.values().data(), DType::kF32, shape);
    for (KVCache& layer : layers_) {
      layer.Append(k, v, {.rope = &tokens.rope()});
      if (!last) layer.Seal();
    }
  }

  void Seal() override {
    for (KVCache& layer : layers_) layer.Seal();
  }

  void Prepare(const std::vector<float>& queries, int n, int group) override {
    queries_ = queries;
    output_.resize(queries.size());
    n_ = n;
    group_ = group;
  }

  void Run(int i) override {
    const auto out = MutableTensor::Rows(output_.data(), n_, shape_.query_heads, shape_.head_dim);
    AttendArgs args;
    args.q = ConstTensor::Rows(queries_.data(), n_, shape_.query_heads, shape_.head_dim);
    for (int layer = i * group_; layer < (i + 1) * group_; ++layer) {
      layers_[layer].Attend(args, out);
    }
  }

  int64_t layer_bytes() const override { return layers_[0].nbytes(); }
  std::string kernel() const override { return KernelTarget(); }
  std::string remark() const override {
    if (!config_.Encodes() || layers_[0].Stats().encoded_tokens > 0) return "";
    return "too few tokens for its method: all of them are exact";
  }

 private:
  AttentionShape shape_;
  KVCacheConfig config_;
  std::vector<KVCache> layers_;
  std::vector<float> queries_, output_;
  int n_ = 0, group_ = 1;
};

class LlamaCache : public AttentionCache {
 public:
  LlamaCache(const std::string& cache, const AttentionShape& shape, int64_t tokens, int layers,
             int threads)
      : shape_(shape),
        bytes_(llama::GgmlAttention::LayerBytes(GgmlOptions(cache, shape, tokens, 1, 1))),
        attention_(GgmlOptions(cache, shape, tokens, layers, threads)) {}

  void Append(const SyntheticTokens& tokens, int64_t position, int n, bool) override {
    const std::array<int64_t, 4> shape = {1, shape_.kv_heads, n, shape_.head_dim};
    attention_.Fill(position, ConstTensor::Dense(tokens.keys().data(), DType::kF32, shape),
                    ConstTensor::Dense(tokens.values().data(), DType::kF32, shape));
  }
  void Seal() override {}
  void Prepare(const std::vector<float>& queries, int n, int group) override {
    attention_.Prepare(queries, n, group);
  }
  void Run(int i) override { attention_.Run(i); }
  int64_t layer_bytes() const override { return bytes_; }
  std::string kernel() const override { return "llama.cpp"; }

 private:
  AttentionShape shape_;
  int64_t bytes_;
  llama::GgmlAttention attention_;
};

}  // namespace

AttentionBytes EstimateAttentionBytes(const std::string& cache, const AttentionShape& shape,
                                      int64_t tokens, int queries) {
  if (IsLlama(cache)) {
    const llama::GgmlAttentionOptions options = GgmlOptions(cache, shape, tokens, 1, 1);
    return {llama::GgmlAttention::LayerBytes(options),
            llama::GgmlAttention::ScratchBytes(options, queries)};
  }
  const KVCacheConfig config = KVCacheConfig::Parse(cache);
  return {KVCacheBuilder::EstimateBytes(ShapeOf(shape, tokens, 1, 1), config, tokens), 0};
}

std::unique_ptr<AttentionCache> MakeAttentionCache(const std::string& cache,
                                                   const AttentionShape& shape, int64_t tokens,
                                                   int layers, int threads) {
  if (IsLlama(cache)) return std::make_unique<LlamaCache>(cache, shape, tokens, layers, threads);
  return std::make_unique<OwnCache>(cache, shape, tokens, layers, threads);
}

}  // namespace palu::app
