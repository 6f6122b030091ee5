#include "kv_estimate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

namespace palu::app {
namespace {

constexpr double kFp16Bits = 16;

// Bits per element of ggml's cache types, block scales included (ggml.h).
double LlamaBits(std::string_view type) {
  constexpr std::array<std::pair<std::string_view, double>, 9> kTypes = {{
      {"f32", 32},
      {"q8_0", 8.5},
      {"q4_0", 4.5},
      {"q4_1", 5},
      {"iq4_nl", 4.5},
      {"q5_0", 5.5},
      {"q5_1", 6},
      {"f16", kFp16Bits},
      {"bf16", kFp16Bits},
  }};
  for (const auto& [name, bits] : kTypes) {
    if (type == name) return bits;
  }
  return 0;  // unknown: the session says so
}

// Least bits per encoded token and head of one side with D dims.
double EncodedBits(const KVCacheConfig& config, int dims) {
  if (!config.Encodes()) return 0;
  const bool full_rank = !config.rank && config.energy_threshold >= 1;
  const int rank = full_rank ? dims : std::min(config.rank.value_or(1), dims);
  const double scale = config.scales == ScaleFormat::kMinMax ? 32.0 : 8.0;
  const double scales = rank * scale / config.group_size;
  switch (config.bit_plan) {
    case BitPlan::kAuto:  // a channel has at most 8 bits: a low rank cannot use up a large budget
      return std::min(config.auto_bits * dims, 8.0 * rank);
    case BitPlan::kUniform:
      return rank * config.uniform_bits + scales;
    case BitPlan::kSchedule:  // most channels may get none
      return 0;
    case BitPlan::kMixed:
      break;
  }
  const int high = std::max(1, static_cast<int>(std::floor(rank * config.hi_fraction)));
  return high * config.hi_bit + (rank - high) * config.lo_bit + scales;
}

// Of a layer with a sliding window: a page of its recent tokens is exact.
double WindowedBits(const LayerShape& layer, const KVCacheConfig& config, int64_t tokens) {
  tokens = std::min<int64_t>(tokens, layer.window);
  const double exact_bits = config.method == "fp32" ? 2 * kFp16Bits : kFp16Bits;
  const int64_t packed = config.EncodesWindows()
                             ? std::max<int64_t>(0, tokens - std::min(config.recent_tokens, 32))
                             : 0;
  return layer.kv_heads * (layer.head_dim_k + layer.head_dim_v) *
         (static_cast<double>(packed * config.windowed_bits) +
          static_cast<double>(tokens - packed) * exact_bits);
}

double LayerBits(const LayerShape& layer, const KVCacheConfig& config, int64_t tokens) {
  const int64_t dims = layer.head_dim_k + layer.head_dim_v;
  if (layer.window > 0) return WindowedBits(layer, config, tokens);
  const bool fitted = config.basis == BasisKind::kFile;
  const int64_t fit_tokens = fitted ? 0
                             : config.fit_tokens < 0
                                 ? 8 * std::max(layer.head_dim_k, layer.head_dim_v)
                                 : config.fit_tokens;
  const bool exact = config.method == "fp16" || config.method == "fp32" || tokens < fit_tokens;
  const int64_t encoded =
      exact ? 0 : std::max<int64_t>(0, tokens - config.sink_tokens - config.recent_tokens);
  const double bits = EncodedBits(config, layer.head_dim_k) + EncodedBits(config, layer.head_dim_v);
  // A group of tokens that is not full yet is exact: the estimate stays below.
  const double exact_bits = config.method == "fp32" ? 2 * kFp16Bits : kFp16Bits;
  return layer.kv_heads * (encoded * bits + (tokens - encoded) * exact_bits * dims);
}

}  // namespace

int64_t EstimateKvBytes(const ModelShape& shape, const std::string& cache, int64_t tokens) {
  constexpr std::string_view kLlama = "llama:";
  double bits = 0;
  if (cache.starts_with(kLlama)) {
    // TYPE, or TYPE_K/TYPE_V.
    const std::string types = cache.substr(kLlama.size(), cache.find(',') - kLlama.size());
    const size_t slash = types.find('/');
    const double key_bits = LlamaBits(std::string_view(types).substr(0, slash));
    const double value_bits = slash == std::string::npos
                                  ? key_bits
                                  : LlamaBits(std::string_view(types).substr(slash + 1));
    for (const LayerShape& layer : shape.layers) {
      const int64_t kept = layer.window > 0 ? std::min<int64_t>(tokens, layer.window) : tokens;
      bits += static_cast<double>(kept * layer.kv_heads) *
              (key_bits * layer.head_dim_k + value_bits * layer.head_dim_v);
    }
  } else {
    const KVCacheConfig config = KVCacheConfig::Parse(cache);
    if (config.Encodes() && !config.HasBasis()) {
      // Nothing is left to the data: the library knows the formats. It is right within 2 %.
      return static_cast<int64_t>(0.98 * KVCacheBuilder::EstimateBytes(shape, config, tokens));
    }
    for (const LayerShape& layer : shape.layers) bits += LayerBits(layer, config, tokens);
  }
  return static_cast<int64_t>(bits / 8);
}

}  // namespace palu::app
