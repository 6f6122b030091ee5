// The parts of `palu bench attention`: shapes, plans, made-up tokens, and llama.cpp's attention.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "bench/attention_cache.h"
#include "bench/attention_options.h"
#include "bench/attention_plan.h"
#include "bench/samples.h"
#include "bench/synthetic.h"
#include "llama/ggml_attention.h"
#include "palu/palu.h"

namespace palu::app {
namespace {

template <typename Error, typename Call>
void ExpectError(Call&& call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "no error that says " << part;
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

TEST(BenchShape, IsThreeNumbers) {
  const AttentionShape shape = ParseShape("32x8x128");
  EXPECT_EQ(shape.query_heads, 32);
  EXPECT_EQ(shape.kv_heads, 8);
  EXPECT_EQ(shape.head_dim, 128);
  EXPECT_EQ(shape.Name(), "32x8x128");
}

TEST(BenchShape, AnythingElseIsRefused) {
  for (const char* text :
       {"", "9", "9x3", "9x3x64x2", "9x3x64 ", "ax3x64", "9x3x", "99999999999x1x2"}) {
    ExpectError<ConfigError>([&] { ParseShape(text); }, "is not HxKxD");
  }
  ExpectError<ConfigError>([] { ParseShape("9x2x64"); }, "9 query heads for 2 KV heads");
  ExpectError<ConfigError>([] { ParseShape("0x1x64"); }, "0 query heads");
  ExpectError<ConfigError>([] { ParseShape("4x0x64"); }, "for 0 KV heads");
  ExpectError<ConfigError>([] { ParseShape("4x-2x64"); }, "for -2 KV heads");
  ExpectError<ConfigError>([] { ParseShape("4x2x63"); }, "even, 2..1024");
  ExpectError<ConfigError>([] { ParseShape("4x2x2048"); }, "even, 2..1024");
}

AttentionOptions SmallOptions() {
  AttentionOptions options;
  options.shapes = {ParseShape("4x2x64")};
  options.caches = {"fp16", "palu:bits=auto:4", "llama:f16"};
  options.prefill = 32;
  options.walk = 8 << 20;
  return options;
}

TEST(BenchOptions, TheBaseOfAllRatiosIsAlwaysMeasured) {
  AttentionOptions options = SmallOptions();
  options.caches = {"palu"};
  CheckAttentionOptions(options);
  EXPECT_EQ(options.caches, (std::vector<std::string>{"fp16", "palu"}));
}

TEST(BenchOptions, CachesMustFitTheShape) {
  AttentionOptions options = SmallOptions();
  options.shapes = {ParseShape("4x2x40")};
  options.caches = {"fp16", "llama:q8_0"};
  ExpectError<ConfigError>([&] { CheckAttentionOptions(options); }, "multiples of 32");
  options.caches = {"fp16", "palu:rank=64"};
  ExpectError<ConfigError>([&] { CheckAttentionOptions(options); }, "rank");
}

TEST(BenchPlan, LayersAddUpToTheWalk) {
  const AttentionOptions options = SmallOptions();
  const AttentionPlan plan = PlanAttention(options, options.shapes[0], 1024, int64_t{1} << 32);
  EXPECT_TRUE(plan.notes.empty());
  ASSERT_EQ(plan.caches.size(), 3u);
  // fp16: 1024 tokens x 2 heads x 128 x 2 bytes = 512 KiB, so 16 layers; a quarter of the bits
  // takes about four times as many.
  EXPECT_GE(plan.caches[0].layers, 14);
  EXPECT_LE(plan.caches[0].layers, 16);
  EXPECT_GT(plan.caches[1].layers, 2 * plan.caches[0].layers);
  EXPECT_EQ(plan.caches[2].layers, 16);
  for (const CachePlan& cache : plan.caches) EXPECT_EQ(cache.layers % cache.group, 0);
}

TEST(BenchPlan, SaysWhatTheMemoryCapsAndRefusesWhatDoesNotFit) {
  const AttentionOptions options = SmallOptions();
  const AttentionPlan plan = PlanAttention(options, options.shapes[0], 1024, 12 << 20);
  ASSERT_EQ(plan.notes.size(), 3u);
  EXPECT_NE(plan.notes[0].find("the memory ends there"), std::string::npos) << plan.notes[0];
  ExpectError<MemoryError>([&] { PlanAttention(options, options.shapes[0], 1024, 1 << 20); },
                           "allowed: 1.0 MiB");
}

TEST(BenchPlan, SaysThatFewTokensHaveFewQueries) {
  const AttentionOptions options = SmallOptions();
  const AttentionPlan plan = PlanAttention(options, options.shapes[0], 16, int64_t{1} << 32);
  EXPECT_EQ(plan.queries, 16);
  ASSERT_FALSE(plan.notes.empty());
  EXPECT_NE(plan.notes[0].find("only 16 tokens"), std::string::npos);
}

TEST(SyntheticTokens, RepeatButForTheirRotation) {
  SyntheticTokens tokens(4, 2, 16);
  tokens.Make(0, 8);
  const std::vector<float> keys(tokens.keys().begin(), tokens.keys().end());
  const std::vector<float> values(tokens.values().begin(), tokens.values().end());
  tokens.Make(4096, 8);
  EXPECT_TRUE(std::equal(values.begin(), values.end(), tokens.values().begin()));
  double turned = 0;
  for (size_t i = 0; i < keys.size(); i += 2) {
    const float *a = &keys[i], *b = &tokens.keys()[i];
    EXPECT_NEAR(std::hypot(a[0], a[1]), std::hypot(b[0], b[1]), 1e-4);
    turned += std::abs(a[0] - b[0]);
  }
  EXPECT_GT(turned, 1);
}

TEST(SyntheticTokens, ChunksDoNotMatter) {
  SyntheticTokens tokens(4, 2, 16);
  tokens.Make(90, 20);
  const std::vector<float> whole(tokens.keys().begin(), tokens.keys().end());
  tokens.Make(100, 10);
  for (int h = 0; h < 2; ++h) {
    EXPECT_TRUE(
        std::equal(&tokens.keys()[h * 160], &tokens.keys()[h * 160] + 160, &whole[h * 320 + 160]));
  }
}

TEST(SyntheticTokens, HaveAFallingSpectrumAndAMemory) {
  SyntheticTokens tokens(4, 1, 64);
  tokens.Make(0, 4096);
  const auto x = tokens.values();
  double first = 0, last = 0, step = 0;
  for (int t = 0; t < 4095; ++t) {
    first += x[t * 64] * x[t * 64];
    last += x[t * 64 + 63] * x[t * 64 + 63];
    step += (x[(t + 1) * 64] - x[t * 64]) * (x[(t + 1) * 64] - x[t * 64]);
  }
  EXPECT_GT(first, 20 * last);
  EXPECT_NEAR(step / first, 2 * (1 - 0.9), 0.05);
}

// A baseline that computed something else would be a baseline of nothing.
TEST(GgmlAttention, AgreesWithOurs) {
  constexpr int kTokens = 300, kQueries = 5, kHeads = 6, kKvHeads = 2, kDim = 64;
  SyntheticTokens tokens(kHeads, kKvHeads, kDim);
  const std::vector<float> queries = tokens.Queries(kTokens - kQueries, kQueries);
  const std::array<int64_t, 4> kv = {1, kKvHeads, kTokens, kDim};
  tokens.Make(0, kTokens);
  const auto k = ConstTensor::Dense(tokens.keys().data(), DType::kF32, kv);
  const auto v = ConstTensor::Dense(tokens.values().data(), DType::kF32, kv);
  auto caches = KVCacheBuilder::ForModel(ModelShape::Uniform(1, kKvHeads, kDim),
                                         KVCacheConfig::Parse("fp32"));
  caches[0].Append(k, v, {.rope = &tokens.rope()});
  std::vector<float> expected(queries.size());
  AttendArgs args;
  args.q = ConstTensor::Rows(queries.data(), kQueries, kHeads, kDim);
  caches[0].Attend(args, MutableTensor::Rows(expected.data(), kQueries, kHeads, kDim));

  const auto error = [&](const std::string& cache) {
    llama::GgmlAttention attention({.cache = cache,
                                    .query_heads = kHeads,
                                    .kv_heads = kKvHeads,
                                    .head_dim = kDim,
                                    .tokens = kTokens,
                                    .layers = 4,
                                    .threads = 1});
    attention.Fill(0, k, v);
    attention.Prepare(queries, kQueries, 2);
    EXPECT_EQ(attention.groups(), 2);
    double difference = 0, size = 0;
    for (int group = 0; group < attention.groups(); ++group) {
      attention.Run(group);
      const auto out = attention.Output(group);
      EXPECT_EQ(out.size(), expected.size());
      for (size_t i = 0; i < out.size(); ++i) {
        difference += (out[i] - expected[i]) * (out[i] - expected[i]);
        size += expected[i] * expected[i];
      }
    }
    return std::sqrt(difference / size);
  };
  EXPECT_LT(error("llama:f32,fa=off"), 1e-3);  // f32 queries and keys, but exp is approximate
  EXPECT_LT(error("llama:f16,fa=off"), 3e-3);
  EXPECT_LT(error("llama:f16"), 5e-3);  // sums of values are fp16 there
  EXPECT_LT(error("llama:f32"), 5e-3);
  EXPECT_LT(error("llama:q8_0"), 3e-2);
  EXPECT_GT(error("llama:q4_0"), 3e-2);
  EXPECT_LT(error("llama:q4_0"), 3e-1);
}

TEST(GgmlAttention, RefusesWhatIsNotThere) {
  llama::GgmlAttention attention({.query_heads = 2, .kv_heads = 1, .head_dim = 32, .tokens = 256});
  const std::vector<float> rows(32 * 20);
  const auto x = ConstTensor::Dense(rows.data(), DType::kF32, {1, 1, 20, 32});
  ExpectError<InputError>([&] { attention.Fill(240, x, x); }, "240 + 20 tokens");
  ExpectError<InputError>([&] { attention.Prepare(rows, 300, 1); }, "queries of 300 tokens");
  ExpectError<ConfigError>([] { llama::GgmlAttention({.cache = "llama:q4_0,fa=off"}); }, "fa=on");
}

TEST(BenchSamples, MedianAndEnds) {
  const Spread odd = SpreadOf({3, 1, 2});
  EXPECT_EQ(odd.median, 2);
  EXPECT_EQ(odd.min, 1);
  EXPECT_EQ(odd.max, 3);
  EXPECT_EQ(SpreadOf({4, 1, 2, 8}).median, 3);
  EXPECT_EQ(SpreadOf({}).median, 0);
}

}  // namespace
}  // namespace palu::app
