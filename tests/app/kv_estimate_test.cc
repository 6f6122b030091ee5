#include "kv_estimate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "palu/palu.h"

namespace palu::app {
namespace {

constexpr int kLayers = 2, kHeads = 3, kDim = 64;
const ModelShape kShape = ModelShape::Uniform(kLayers, kHeads, kDim);

int64_t Fp16Bytes(int64_t tokens) { return tokens * kLayers * kHeads * 2 * kDim * 2; }

// Bytes that real caches allocate for Gaussian keys and values.
int64_t RealBytes(const std::string& cache, int64_t tokens) {
  std::vector<KVCache> caches = KVCacheBuilder::ForModel(kShape, KVCacheConfig::Parse(cache));
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> rows(tokens * kHeads * kDim);
  for (float& x : rows) x = normal(random);
  const ConstTensor tensor = ConstTensor::Rows(rows.data(), tokens, kHeads, kDim);
  const RopeParams rope;
  int64_t bytes = 0;
  for (KVCache& layer : caches) {
    layer.Append(tensor, tensor, {.rope = &rope});
    layer.Seal();
    bytes += layer.nbytes();
  }
  return bytes;
}

TEST(EstimateKvBytes, ExactCachesAreTheirElements) {
  EXPECT_EQ(EstimateKvBytes(kShape, "fp16", 1000), Fp16Bytes(1000));
  EXPECT_EQ(EstimateKvBytes(kShape, "fp32", 1000), 2 * Fp16Bytes(1000));
  EXPECT_EQ(EstimateKvBytes(kShape, "llama:f16", 1000), Fp16Bytes(1000));
  EXPECT_EQ(EstimateKvBytes(kShape, "llama:q8_0,fa=on", 1000), Fp16Bytes(1000) * 17 / 32);
}

TEST(EstimateKvBytes, ShortPromptsStayExact) {
  EXPECT_EQ(EstimateKvBytes(kShape, "palu", 100), Fp16Bytes(100));
}

TEST(EstimateKvBytes, IsCloseToWhatCachesAllocateAndNeverAbove) {
  constexpr int64_t kTokens = 4096;
  for (const char* cache :
       {"fp16", "palu", "palu:bits=auto:2", "palu:bits=auto:6", "palu:rank=16,hi_bit=4,lo_bit=2",
        "palu:reference,rank=32", "palu:bits=3", "palu:small", "palu:quality", "uniform:bits=4",
        "kivi", "q4_0", "q8_0/q4_0", "rabitq"}) {
    const int64_t estimate = EstimateKvBytes(kShape, cache, kTokens);
    const int64_t real = RealBytes(cache, kTokens);
    EXPECT_LE(estimate, real) << cache;
    EXPECT_GE(estimate, 0.6 * real) << cache;
  }
}

TEST(EstimateKvBytes, IsNotAboveWhereTheDataDecidesTheRank) {
  for (const char* cache : {"svdq", "palu:reference"}) {
    EXPECT_LE(EstimateKvBytes(kShape, cache, 4096), RealBytes(cache, 4096)) << cache;
  }
}

TEST(EstimateKvBytes, SlidingWindowsAreBounded) {
  ModelShape shape = kShape;
  for (LayerShape& layer : shape.layers) layer.window = 128;
  for (const char* cache : {"fp16", "palu:windowed_bits=16", "palu:reference"}) {
    EXPECT_EQ(EstimateKvBytes(shape, cache, 100'000), Fp16Bytes(128)) << cache;
  }
  // The last 32 tokens at least are exact, the others have 8 bits and their scales.
  EXPECT_EQ(EstimateKvBytes(shape, "palu", 100'000), Fp16Bytes(32) + Fp16Bytes(96) / 2);
}

TEST(EstimateKvBytes, RefusesWhatIsNoCache) {
  EXPECT_THROW(EstimateKvBytes(kShape, "nonsense", 10), ConfigError);
}

}  // namespace
}  // namespace palu::app
