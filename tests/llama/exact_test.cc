// Our attention inside llama.cpp gives plain llama.cpp's logits, to its own noise floor.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "adapter_test_util.h"

namespace palu::llama {
namespace {

constexpr int kTokens = 300;
constexpr int kOddChunk = 77;

// What plain llama.cpp differs from itself when the same tokens come one by one instead of in one
// batch.
double NoiseFloor(const Model& model, const std::vector<Token>& tokens,
                  const std::vector<float>& expected) {
  return Compare(expected, PlainLogits(model, tokens, {.chunk = 1}), model.info().vocabulary).max;
}

class ExactTest : public testing::TestWithParam<const char*> {};

TEST_P(ExactTest, Fp32CacheEqualsPlainLlamaCppHoweverThePromptIsCut) {
  const auto model = LoadRandom(MakeRandomModel(GetParam()));
  const int vocabulary = model->info().vocabulary;
  const auto tokens = RandomTokens(kTokens, vocabulary);
  // LongRoPE models choose their factors by the number of cells; ours was loaded for the whole
  // training context.
  const auto expected = PlainLogits(*model, tokens);
  const double noise = NoiseFloor(*model, tokens, expected);
  for (const int chunk : {kTokens, kOddChunk, 1}) {
    Session session(model, CacheOptions("fp32"));
    const Difference d = Compare(expected, SessionLogits(session, tokens, chunk), vocabulary);
    std::printf("%-8s chunk %3d: %s, llama.cpp's own noise %.3g\n", GetParam(), chunk,
                ToString(d).c_str(), noise);
    EXPECT_LE(d.max, 3 * noise + 1e-6 * d.spread) << "chunk " << chunk;
    EXPECT_EQ(d.flips, 0) << "chunk " << chunk;
    EXPECT_GT(d.spread, 0.1);
  }
}

TEST_P(ExactTest, Fp16CacheDiffersNoMoreThanLlamaCppsOwn) {
  const auto model = LoadRandom(MakeRandomModel(GetParam()));
  const int vocabulary = model->info().vocabulary;
  const auto tokens = RandomTokens(kTokens, vocabulary);
  const auto expected = PlainLogits(*model, tokens);
  const Difference theirs =
      Compare(expected, PlainLogits(*model, tokens, {.type = GGML_TYPE_F16}), vocabulary);
  Session session(model, CacheOptions("fp16"));
  const Difference ours = Compare(expected, SessionLogits(session, tokens, kOddChunk), vocabulary);
  std::printf("%-8s fp16: %s; llama.cpp f16: %s\n", GetParam(), ToString(ours).c_str(),
              ToString(theirs).c_str());
  EXPECT_LE(ours.rms, 1.5 * theirs.rms);
  EXPECT_LE(ours.max, 2 * theirs.max);
  EXPECT_GT(ours.rms, 0) << "an fp16 cache that rounds nothing is not one";
}

INSTANTIATE_TEST_SUITE_P(Architectures, ExactTest,
                         testing::Values("llama", "qwen2", "qwen2vl", "qwen3", "gemma2", "gemma3",
                                         "gemma4", "phi3", "smollm3", "gpt-oss"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(ExactPositionsTest, GoBeyondTheTrainingContextAndLlamaCppsCells) {
  for (const char* architecture : {"llama", "gemma3"}) {
    RandomModel random = MakeRandomModel(architecture);
    random.train_context = 128;
    const auto model = LoadRandom(random);
    const auto tokens = RandomTokens(600, random.vocabulary);
    const auto expected = PlainLogits(*model, tokens);
    const double noise = NoiseFloor(*model, tokens, expected);
    SessionOptions options = CacheOptions("fp32");
    options.ubatch = 64;  // llama.cpp's own cache then has 256 cells
    Session session(model, options);
    const Difference d = Compare(expected, SessionLogits(session, tokens, 150), random.vocabulary);
    EXPECT_LE(d.max, 3 * noise + 1e-6 * d.spread) << architecture << ": " << ToString(d);
    EXPECT_EQ(session.position(), 600);
  }
}

TEST(ExactLongRopeTest, FactorsFollowTheContextOfTheRunNotLlamaCppsCells) {
  RandomModel random = MakeRandomModel("phi3");
  random.long_rope_original = 300;
  const auto tokens = RandomTokens(280, random.vocabulary);
  const std::string path = TempPath("long_rope.gguf");
  WriteRandomModel(random, path);
  const auto long_model = Model::Load(path, {.context = 2048});
  const auto short_model = Model::Load(path, {.context = 300});
  // What llama.cpp does by itself: 256 cells are below the original context, 2048 above it. The
  // unmodified file is loaded without us.
  llama_model* raw = llama_model_load_from_file(path.c_str(), llama_model_default_params());
  ASSERT_NE(raw, nullptr);
  const auto raw_logits = [&](uint32_t cells) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = cells;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context* context = llama_init_from_model(raw, params);
    std::vector<Token> copy(tokens.begin(), tokens.begin() + 200);
    EXPECT_EQ(llama_decode(context, llama_batch_get_one(copy.data(), 200)), 0);
    std::vector<float> last(llama_get_logits_ith(context, -1),
                            llama_get_logits_ith(context, -1) + random.vocabulary);
    llama_free(context);
    return last;
  };
  const auto own_logits = [&](const std::shared_ptr<const Model>& model) {
    Session session(model, CacheOptions("fp32"));
    session.Decode(std::span(tokens).first(200));
    return std::vector<float>(session.Logits().begin(), session.Logits().end());
  };
  const auto raw_short = raw_logits(256), raw_long = raw_logits(2048);
  llama_model_free(raw);
  EXPECT_LT(Compare(raw_short, own_logits(short_model), random.vocabulary).max, 1e-4);
  EXPECT_LT(Compare(raw_long, own_logits(long_model), random.vocabulary).max, 1e-4);
  EXPECT_GT(Compare(raw_short, raw_long, random.vocabulary).max, 1e-2)
      << "the two sets of factors must matter";

  SessionOptions too_long = CacheOptions("fp32");
  too_long.context = 1000;
  EXPECT_ANY_THROW(Session(short_model, too_long));
}

TEST(ExactNativeTest, LlamaCppsOwnCacheThroughTheSameInterfaceEqualsPlainLlamaCpp) {
  for (const char* architecture : {"llama", "gemma2"}) {
    const auto model = LoadRandom(MakeRandomModel(architecture));
    const int vocabulary = model->info().vocabulary;
    const auto tokens = RandomTokens(kTokens, vocabulary);
    SessionOptions options = CacheOptions("llama:f32,fa=off");
    options.context = kTokens;
    Session session(model, options);
    EXPECT_FALSE(session.own_cache());
    const auto expected = PlainLogits(*model, tokens, {.chunk = kOddChunk});
    const Difference d = Compare(expected, SessionLogits(session, tokens, kOddChunk), vocabulary);
    EXPECT_LE(d.max, 1e-4 * d.spread) << architecture << ": " << ToString(d);
  }
}

TEST(ExactLogitRowsTest, TheLastRowAloneIsTheLastOfAll) {
  const auto model = LoadRandom(MakeRandomModel("llama"));
  const auto tokens = RandomTokens(100, model->info().vocabulary);
  SessionOptions options = CacheOptions("fp32");
  options.ubatch = 32;
  Session all(model, options), last(model, options), none(model, options);
  all.Decode(tokens, LogitRows::kAll);
  last.Decode(tokens, LogitRows::kLast);
  none.Decode(std::span(tokens).first(99), LogitRows::kNone);
  EXPECT_EQ(all.logit_rows(), 100);
  EXPECT_EQ(last.logit_rows(), 1);
  EXPECT_EQ(none.logit_rows(), 0);
  EXPECT_ANY_THROW(none.Logits());
  none.Decode(std::span(tokens).last(1));
  for (int i = 0; i < model->info().vocabulary; ++i) {
    ASSERT_NEAR(all.Logits(99)[i], last.Logits()[i], 1e-4);
    ASSERT_NEAR(all.Logits(99)[i], none.Logits()[i], 1e-4);
  }
}

}  // namespace
}  // namespace palu::llama
