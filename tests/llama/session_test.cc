// Sessions: taking tokens back, errors that change nothing, limits, numbers.
#include "llama/session.h"

#include <gtest/gtest.h>

#include <numeric>

#include "adapter_test_util.h"
#include "llama/model_impl.h"
#include "palu/errors.h"

namespace palu::llama {
namespace {

std::vector<float> LastLogits(Session& session, std::span<const Token> tokens) {
  session.Decode(tokens);
  const std::span<const float> logits = session.Logits();
  return {logits.begin(), logits.end()};
}

class RollbackTest : public testing::TestWithParam<const char*> {};

TEST_P(RollbackTest, TrimThenOtherTokensEqualsAFreshRun) {
  const auto model = LoadRandom(MakeRandomModel("llama"));
  const int vocabulary = model->info().vocabulary;
  const auto tokens = RandomTokens(200, vocabulary, 1), others = RandomTokens(60, vocabulary, 2);
  SessionOptions options = CacheOptions(GetParam());
  options.context = 512;
  Session trimmed(model, options), fresh(model, options);
  trimmed.Decode(tokens);
  trimmed.Trim(30);
  EXPECT_EQ(trimmed.position(), 170);
  const auto got = LastLogits(trimmed, others);
  fresh.Decode(std::span(tokens).first(170));
  const auto expected = LastLogits(fresh, others);
  EXPECT_EQ(trimmed.position(), fresh.position());
  EXPECT_LT(Compare(expected, got, vocabulary).max, 1e-4) << GetParam();
  EXPECT_THROW(trimmed.Trim(trimmed.position() + 1), StateError);
  EXPECT_THROW(trimmed.Trim(-1), StateError);
}

TEST_P(RollbackTest, ClearStartsAnew) {
  const auto model = LoadRandom(MakeRandomModel("llama"));
  const auto tokens = RandomTokens(100, model->info().vocabulary);
  SessionOptions options = CacheOptions(GetParam());
  options.context = 512;
  Session session(model, options);
  const auto first = LastLogits(session, tokens);
  session.Clear();
  EXPECT_EQ(session.position(), 0);
  EXPECT_EQ(LastLogits(session, tokens), first);
}

// The window of palu:recent_tokens=64 is not cut by the 30 tokens above, so nothing is decoded
// anew.
INSTANTIATE_TEST_SUITE_P(Caches, RollbackTest, testing::Values("fp32", "fp16", "palu", "llama:f16"),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& c : name) c = c == ':' ? '_' : c;
                           return name;
                         });

TEST(SessionWindowTest, TrimOfDroppedTokensIsAnErrorThatChangesNothing) {
  const auto model = LoadRandom(MakeRandomModel("gemma2"));
  const auto tokens = RandomTokens(400, model->info().vocabulary);
  SessionOptions options = CacheOptions("fp16");
  options.ubatch = 100;
  Session session(model, options);
  session.Decode(tokens);
  EXPECT_THROW(session.Trim(300), StateError);
  EXPECT_EQ(session.position(), 400);
  for (const KVCache& cache : session.caches()) EXPECT_EQ(cache.size(), 400);
  session.Decode(std::span(tokens).first(5));
  EXPECT_EQ(session.position(), 405);
}

class NanTest : public testing::TestWithParam<const char*> {
 protected:
  static constexpr Token kBad = 7;
  void SetUp() override {
    RandomModel random = MakeRandomModel(GetParam());
    random.nan_token = kBad;
    model_ = LoadRandom(random);
    tokens_ = RandomTokens(400, random.vocabulary);
    for (Token& token : tokens_) token = token == kBad ? 8 : token;
    options_ = CacheOptions("fp32");
    options_.ubatch = 64;
    options_.self_test = false;  // it may draw the bad token
  }
  // Without the bad token's logit, which is NaN where input and output share their embedding.
  static std::vector<float> FiniteLogits(Session& session, std::span<const Token> tokens) {
    std::vector<float> logits = LastLogits(session, tokens);
    logits[kBad] = 0;
    return logits;
  }
  std::shared_ptr<const Model> model_;
  std::vector<Token> tokens_;
  SessionOptions options_;
};

TEST_P(NanTest, InAPromptTakesAllOfItBack) {
  Session session(model_, options_), fresh(model_, options_);
  session.Decode(std::span(tokens_).first(100));
  std::vector<Token> bad(tokens_.begin() + 100, tokens_.begin() + 350);
  bad[200] = kBad;  // in the fourth batch: the windows have moved past the start by then
  EXPECT_THROW(session.Decode(bad), InputError);
  EXPECT_EQ(session.position(), 100);
  EXPECT_EQ(session.logit_rows(), 0);
  for (const KVCache& cache : session.caches()) EXPECT_EQ(cache.size(), 100);
  const auto got = FiniteLogits(session, std::span(tokens_).subspan(100));
  fresh.Decode(std::span(tokens_).first(100));
  EXPECT_EQ(got, FiniteLogits(fresh, std::span(tokens_).subspan(100)));
}

TEST_P(NanTest, InASingleTokenTakesItBack) {
  Session session(model_, options_), fresh(model_, options_);
  for (int i = 0; i < 70; ++i) {  // across a page of 32 and beyond a window
    session.Decode({&tokens_[i], 1});
    EXPECT_THROW(session.Decode({&kBad, 1}), InputError);
    ASSERT_EQ(session.position(), i + 1);
  }
  fresh.Decode(std::span(tokens_).first(70));
  const auto got = FiniteLogits(session, std::span(tokens_).subspan(70, 30));
  const auto expected = FiniteLogits(fresh, std::span(tokens_).subspan(70, 30));
  EXPECT_LT(Compare(expected, got, model_->info().vocabulary).max, 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Architectures, NanTest, testing::Values("llama", "gemma2"));

TEST(SessionErrorTest, NoTokensAndForeignTokens) {
  const auto model = LoadRandom(MakeRandomModel("llama"));
  Session session(model, CacheOptions("fp16"));
  EXPECT_THROW(session.Decode({}), InputError);
  const std::vector<Token> foreign = {1, model->info().vocabulary, 2};
  EXPECT_THROW(session.Decode(foreign), InputError);
  const std::vector<Token> negative = {-1};
  EXPECT_THROW(session.Decode(negative), InputError);
  EXPECT_EQ(session.position(), 0);
  EXPECT_THROW(session.Logits(), InputError);
}

TEST(SessionErrorTest, OptionsOutOfRange) {
  const auto model = LoadRandom(MakeRandomModel("llama"));
  const auto with = [&](auto change) {
    SessionOptions options = CacheOptions("fp16");
    change(options);
    return Session(model, options);
  };
  EXPECT_THROW(with([](auto& o) { o.ubatch = 0; }), ConfigError);
  EXPECT_THROW(with([](auto& o) { o.ubatch = 5000; }), ConfigError);
  EXPECT_THROW(with([](auto& o) { o.threads = -1; }), ConfigError);
  EXPECT_THROW(with([](auto& o) { o.context = -1; }), ConfigError);
  EXPECT_THROW(with([](auto& o) { o.kv_memory = -1; }), ConfigError);
  for (const char* cache : {"no_such_method", "palu:no_such_option=1", "llama:", "llama:q3_k",
                            "llama:f16,fa=maybe", "llama:q8_0,fa=off", "palu:rank=1000"}) {
    EXPECT_THROW(with([&](auto& o) { o.cache = cache; }), ConfigError) << cache;
  }
}

TEST(SessionMemoryTest, APromptThatCannotFitIsRefusedBeforeAnythingIsComputed) {
  const RandomModel random = MakeRandomModel("llama");
  const auto model = LoadRandom(random);
  const auto tokens = RandomTokens(1000, random.vocabulary);
  SessionOptions options = CacheOptions("fp16");
  const int64_t per_token = int64_t{2} * 2 * random.layers * random.kv_heads * random.head_dim;
  options.kv_memory = 500 * per_token;
  Session session(model, options);
  int observed = 0;
  session.SetObserver(
      [&](int, const ConstTensor&, const ConstTensor&, int64_t, const RopeParams&) { ++observed; });
  EXPECT_THROW(session.Decode(tokens), MemoryError);
  EXPECT_EQ(observed, 0);
  EXPECT_EQ(session.position(), 0);
  session.Decode(std::span(tokens).first(300));
  EXPECT_EQ(session.position(), 300);
  EXPECT_LE(session.Stats().kv_bytes, options.kv_memory);
}

TEST(SessionMemoryTest, ALimitReachedOnTheWayTakesTheDecodeBack) {
  const RandomModel random = MakeRandomModel("llama");
  const auto model = LoadRandom(random);
  const auto tokens = RandomTokens(1000, random.vocabulary);
  SessionOptions options = CacheOptions("fp16");
  options.ubatch = 64;
  // Enough for the bare rows of 990 tokens, not for the pages they come in.
  options.kv_memory = int64_t{2} * 2 * random.layers * random.kv_heads * random.head_dim * 991;
  Session session(model, options), fresh(model, CacheOptions("fp16"));
  session.Decode(std::span(tokens).first(500));
  int64_t reached = 0;
  EXPECT_THROW(session.Decode(std::span(tokens).subspan(500, 490), LogitRows::kLast,
                              [&](int64_t done) {
                                reached = done;
                                return true;
                              }),
               MemoryError);
  EXPECT_GT(reached, 0) << "the limit was to be met half way";
  EXPECT_EQ(session.position(), 500);
  fresh.Decode(std::span(tokens).first(500));
  EXPECT_LT(Compare(LastLogits(fresh, std::span(tokens).subspan(500, 20)),
                    LastLogits(session, std::span(tokens).subspan(500, 20)), random.vocabulary)
                .max,
            1e-3);
}

TEST(SessionProgressTest, IsToldOfEveryBatchAndCanStop) {
  const auto model = LoadRandom(MakeRandomModel("llama"));
  const auto tokens = RandomTokens(100, model->info().vocabulary);
  SessionOptions options = CacheOptions("fp16");
  options.ubatch = 32;
  Session session(model, options);
  std::vector<int64_t> calls;
  EXPECT_TRUE(session.Decode(tokens, LogitRows::kLast, [&](int64_t done) {
    calls.push_back(done);
    return true;
  }));
  EXPECT_EQ(calls, (std::vector<int64_t>{32, 64, 96, 100}));
  EXPECT_FALSE(session.Decode(tokens, LogitRows::kLast, [](int64_t done) { return done < 64; }));
  EXPECT_EQ(session.position(), 164);
  EXPECT_EQ(session.logit_rows(), 0);
  EXPECT_TRUE(session.Decode(std::span(tokens).subspan(64)));
  EXPECT_EQ(session.position(), 200);
}

TEST(SessionObserverTest, SeesEveryRowOfEveryLayerOnce) {
  const RandomModel random = MakeRandomModel("gemma2");
  const auto model = LoadRandom(random);
  SessionOptions options = CacheOptions("fp16");
  options.ubatch = 40;
  Session session(model, options);
  std::vector<int64_t> rows(random.layers);
  session.SetObserver([&](int layer, const ConstTensor& k, const ConstTensor& v, int64_t position,
                          const RopeParams& rope) {
    EXPECT_EQ(position, rows[layer]);
    EXPECT_EQ(k.shape, (std::array<int64_t, 4>{1, random.kv_heads, k.shape[2], random.head_dim}));
    EXPECT_EQ(v.shape, k.shape);
    EXPECT_EQ(rope.inv_freq.size(), static_cast<size_t>(random.head_dim / 2));
    rows[layer] += k.shape[2];
  });
  session.Decode(RandomTokens(100, random.vocabulary));
  EXPECT_EQ(rows, std::vector<int64_t>(random.layers, 100));
  Session native(model, CacheOptions("llama:f16"));
  EXPECT_THROW(native.SetObserver([](auto&&...) {}), StateError);
}

TEST(SessionStatsTest, OwnCachesReportWhatTheirLayersHold) {
  const RandomModel random = MakeRandomModel("llama");
  const auto model = LoadRandom(random);
  const auto tokens = RandomTokens(700, random.vocabulary);
  const int64_t elements = int64_t{2} * random.layers * random.kv_heads * random.head_dim * 700;
  for (const char* cache : {"fp32", "fp16", "palu"}) {
    Session session(model, CacheOptions(cache));
    session.Decode(tokens);
    const SessionStats stats = session.Stats();
    EXPECT_EQ(stats.tokens, 700);
    EXPECT_EQ(stats.kv_fp16_bytes, 2 * elements);
    EXPECT_EQ(stats.kv_bytes, KVCacheBuilder::Memory(session.caches().front()).allocated_bytes)
        << cache;
    EXPECT_EQ(stats.layers.size(), static_cast<size_t>(random.layers));
    EXPECT_NEAR(stats.stored_bits_per_element,
                8.0 * static_cast<double>(stats.kv_bytes) / static_cast<double>(elements), 1e-9);
    EXPECT_TRUE(session.own_cache());
    EXPECT_EQ(KVCacheConfig::Parse(session.cache_text()), KVCacheConfig::Parse(cache));
    if (std::string(cache) != "palu") {
      EXPECT_TRUE(stats.rank_k.empty());
      continue;
    }
    EXPECT_LT(stats.kv_bytes, stats.kv_fp16_bytes);
    ASSERT_EQ(stats.rank_k.size(), static_cast<size_t>(random.layers));
    for (const int rank : stats.rank_k) EXPECT_GT(rank, 0);
    EXPECT_GT(stats.advertised_bits_per_element, 0);
  }
}

TEST(SessionStatsTest, LlamaCppsOwnCacheReportsItsRealSize) {
  const RandomModel random = MakeRandomModel("llama");
  const auto model = LoadRandom(random);
  const int64_t row = int64_t{random.kv_heads} * random.head_dim;
  SessionOptions options = CacheOptions("llama:f16");
  options.context = 1000;  // 1024 cells
  Session f16(model, options);
  EXPECT_EQ(f16.Stats().kv_bytes, 2 * 2 * row * random.layers * 1024);
  EXPECT_EQ(f16.cache_text(), "llama:f16,fa=on");
  options.cache = "llama:q8_0";
  Session q8(model, options);
  EXPECT_EQ(q8.Stats().kv_bytes, 2 * (row / 32 * 34) * random.layers * 1024);
  EXPECT_DOUBLE_EQ(q8.Stats().advertised_bits_per_element, 8.5);
  EXPECT_TRUE(q8.caches().empty());
  options.cache = "llama:f32,fa=off";
  options.kv_memory = 1000;
  EXPECT_THROW(Session(model, options), MemoryError);
}

TEST(SessionStatsTest, LlamaCppsOwnCacheEndsAtItsContext) {
  const auto model = LoadRandom(MakeRandomModel("llama"));
  SessionOptions options = CacheOptions("llama:f16");
  options.context = 250;
  Session session(model, options);
  const auto tokens = RandomTokens(257, model->info().vocabulary);
  EXPECT_THROW(session.Decode(tokens), StateError);
  EXPECT_EQ(session.position(), 0);
  session.Decode(std::span(tokens).first(256));
  EXPECT_THROW(session.Decode(std::span(tokens).first(1)), StateError);
  EXPECT_EQ(session.position(), 256);
}

TEST(SelfTestTest, PassesOnceAndIsRemembered) {
  const auto model = LoadRandom(MakeRandomModel("gpt-oss"));
  EXPECT_FALSE(model->impl().self_test.has_value());
  Session first(model, CacheOptions("palu"));
  ASSERT_TRUE(model->impl().self_test.has_value());
  EXPECT_EQ(*model->impl().self_test, "");
  // A remembered verdict decides, without a new run.
  model->impl().self_test = "it was said to differ";
  try {
    Session second(model, CacheOptions("palu"));
    FAIL() << "the verdict was not used";
  } catch (const FormatError& error) {
    EXPECT_NE(std::string(error.what()).find("it was said to differ"), std::string::npos);
  }
}

TEST(SelfTestTest, SeesAnAttentionThatIsWrong) {
  // The same weights, but our side is told of windows and heads that the model does not have.
  const auto model = LoadRandom(MakeRandomModel("gpt-oss"));
  auto& impl = const_cast<Model::Impl&>(model->impl());
  for (size_t i = 0; i < impl.layers.size(); ++i)
    impl.layers[i].shape.window = impl.shape.layers[i].window = 0;
  EXPECT_THROW(Session(model, CacheOptions("fp16")), FormatError)
      << "windows of 40 tokens were taken away";
}

TEST(SelfTestTest, CanBeSkipped) {
  const auto model = LoadRandom(MakeRandomModel("llama"));
  SessionOptions options = CacheOptions("fp16");
  options.self_test = false;
  Session session(model, options);
  EXPECT_FALSE(model->impl().self_test.has_value());
}

}  // namespace
}  // namespace palu::llama
