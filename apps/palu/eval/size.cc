#include "eval/size.h"

#include <algorithm>
#include <vector>

namespace palu::app {
namespace {

int64_t ElementsPerToken(const LayerShape& shape) {
  return int64_t{shape.kv_heads} * (shape.head_dim_k + shape.head_dim_v);
}

// Tokens that a layer holds when the sequence has `tokens`.
int64_t Held(const LayerShape& shape, int64_t tokens) {
  return shape.window > 0 ? std::min<int64_t>(tokens, shape.window) : tokens;
}

// Bits per element of tokens to come.
double GrowthBits(const CacheStats& stats) {
  constexpr double kFp16 = 16;
  // Exact layers say their own width; one that is not fitted yet says 0 and grows in fp16.
  return stats.code_bits > 0 ? stats.code_bits : kFp16;
}

}  // namespace

double StoredBitsAt(int64_t tokens, std::span<const LayerShape> shapes,
                    std::span<const CacheStats> stats) {
  double bits = 0, elements = 0;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto per_token = static_cast<double>(ElementsPerToken(shapes[i]));
    const int64_t more = Held(shapes[i], tokens) - Held(shapes[i], stats[i].tokens);
    bits += static_cast<double>(stats[i].nbytes) * 8 +
            static_cast<double>(more) * per_token * GrowthBits(stats[i]);
    elements += static_cast<double>(Held(shapes[i], tokens)) * per_token;
  }
  return elements > 0 ? bits / elements : 0;
}

CacheSize SizeOf(const llama::Session& session) {
  const llama::SessionStats stats = session.Stats();
  CacheSize size;
  size.kv_bytes = stats.kv_bytes;
  size.stored_bits = stats.stored_bits_per_element;
  if (!session.own_cache()) {
    size.code_bits = size.stored_bits_at_32k = stats.advertised_bits_per_element;
    return size;
  }
  std::vector<LayerShape> shapes;
  double code_bits = 0, elements = 0;
  for (const KVCache& cache : session.caches()) {
    const CacheStats& layer = stats.layers[shapes.size()];
    shapes.push_back(cache.shape());
    // Sliding windows have a format of their own: they say nothing about the method's.
    if (cache.shape().window > 0) continue;
    const auto weight = static_cast<double>(ElementsPerToken(cache.shape()));
    code_bits += layer.code_bits * weight;
    elements += weight;
    size.exact_tokens = std::max(size.exact_tokens, layer.exact_tokens);
  }
  size.code_bits = elements > 0 ? code_bits / elements : 0;
  size.stored_bits_at_32k = StoredBitsAt(kLongContext, shapes, stats.layers);
  return size;
}

}  // namespace palu::app
