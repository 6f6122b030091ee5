// Puts synthetic K and V of one layer into caches of several configs and compares what they cost
// and how well they attend:
//   bytes   all that the cache has allocated, and its share of the same tokens in fp16
//   error   |attention - exact| / |exact| over the outputs of all query heads; exact = softmax
//   attention in double
//
// The data is close to low-rank, as real keys and values are: latents of falling size times a
// basis, plus noise.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

#include "palu/palu.h"

namespace {

constexpr int64_t kTokens = 4096;
constexpr int kKvHeads = 4;
constexpr int kQueryHeads = 8;  // two query heads read each KV head
constexpr int kDim = 64;
constexpr int kLatents = 24;
constexpr float kNoise = 0.02f;

std::vector<float> Gaussian(size_t n, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& value : x) value = normal(random);
  return x;
}

// [tokens, heads, dim]; every head has a basis and a mean of its own.
std::vector<float> LowRankRows(std::mt19937& random) {
  const auto basis = Gaussian(kKvHeads * kLatents * kDim, random);
  const auto mean = Gaussian(kKvHeads * kDim, random);
  auto rows = Gaussian(kTokens * kKvHeads * kDim, random);
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int h = 0; h < kKvHeads; ++h) {
      float* row = &rows[(t * kKvHeads + h) * kDim];
      for (int d = 0; d < kDim; ++d) row[d] = kNoise * row[d] + 0.5f * mean[h * kDim + d];
      const auto latent = Gaussian(kLatents, random);
      for (int j = 0; j < kLatents; ++j) {
        const float size = 0.5f * std::pow(0.85f, static_cast<float>(j)) * latent[j];
        for (int d = 0; d < kDim; ++d) row[d] += size * basis[(h * kLatents + j) * kDim + d];
      }
    }
  }
  return rows;
}

// One query per head over all tokens: [kQueryHeads, kDim].
std::vector<double> ExactAttention(const std::vector<float>& q, const std::vector<float>& k,
                                   const std::vector<float>& v) {
  std::vector<double> out(kQueryHeads * kDim), weight(kTokens);
  for (int h = 0; h < kQueryHeads; ++h) {
    const int kv = h / (kQueryHeads / kKvHeads);
    double largest = -INFINITY, total = 0;
    for (int64_t t = 0; t < kTokens; ++t) {
      double dot = 0;
      for (int d = 0; d < kDim; ++d) {
        dot += static_cast<double>(q[h * kDim + d]) * k[(t * kKvHeads + kv) * kDim + d];
      }
      weight[t] = dot / std::sqrt(static_cast<double>(kDim));
      largest = std::max(largest, weight[t]);
    }
    for (double& w : weight) total += w = std::exp(w - largest);
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int d = 0; d < kDim; ++d) {
        out[h * kDim + d] += weight[t] / total * v[(t * kKvHeads + kv) * kDim + d];
      }
    }
  }
  return out;
}

double RelativeError(const std::vector<float>& got, const std::vector<double>& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(error / norm);
}

struct Row {
  const char* config;
  double allowed_error;  // far above what is expected; a wrong build shows, noise does not
};

int Run() {
  std::mt19937 random(1);
  const auto k = LowRankRows(random);
  const auto v = LowRankRows(random);
  auto q = Gaussian(kQueryHeads * kDim, random);
  for (float& value : q)
    value *= 3;  // attention picks some tokens, as in a model, instead of averaging all
  const auto exact = ExactAttention(q, k, v);

  // These keys were never rotated, and the fit is told so: RopeParams without frequencies.
  const palu::RopeParams no_rope;
  const auto keys = palu::ConstTensor::Rows(k.data(), kTokens, kKvHeads, kDim);
  const auto values = palu::ConstTensor::Rows(v.data(), kTokens, kKvHeads, kDim);
  const auto queries = palu::ConstTensor::Rows(q.data(), 1, kQueryHeads, kDim);

  std::printf("%lld tokens, %d KV heads, head_dim %d; kernels: %s\n",
              static_cast<long long>(kTokens), kKvHeads, kDim, palu::KernelTarget().c_str());
  std::printf("%-24s %6s %6s %12s %9s %13s %9s\n", "cache", "rank K", "rank V", "bytes", "of fp16",
              "bits/element", "error");
  bool good = true;
  for (const auto& [text, allowed_error] :
       {Row{"fp16", 2e-3}, Row{"palu", 0.1}, Row{"palu:bits=auto:2", 0.15},
        Row{"palu:bits=auto:4", 0.05}, Row{"palu:reference", 0.5}}) {
    const auto config = palu::KVCacheConfig::Parse(text);
    auto caches =
        palu::KVCacheBuilder::ForModel(palu::ModelShape::Uniform(1, kKvHeads, kDim), config);
    palu::KVCache& cache = caches[0];
    cache.Append(keys, values, {.rope = &no_rope});
    cache.Seal();

    std::vector<float> out(kQueryHeads * kDim);
    cache.Attend({.q = queries}, palu::MutableTensor::Rows(out.data(), 1, kQueryHeads, kDim));
    const double error = RelativeError(out, exact);
    const palu::CacheStats stats = cache.Stats();
    std::printf("%-24s %6d %6d %12lld %8.1f%% %13.3f %9.2g\n", text, stats.rank_k, stats.rank_v,
                static_cast<long long>(stats.nbytes), 100.0 * stats.nbytes / stats.fp16_bytes,
                stats.stored_bits_per_element, error);
    if (!(error <= allowed_error)) {
      std::printf("  error is above %g\n", allowed_error);
      good = false;
    }
  }
  return good ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return Run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
