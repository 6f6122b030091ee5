// Session::FillForBenchmark: a depth without its prefill.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "adapter_test_util.h"
#include "llama/session.h"
#include "palu/errors.h"

namespace palu::llama {
namespace {

std::vector<float> LastLogits(Session& session, std::span<const Token> tokens) {
  session.Decode(tokens);
  const std::span<const float> logits = session.Logits();
  return {logits.begin(), logits.end()};
}

SessionOptions Fillable(const std::string& cache) {
  SessionOptions options = CacheOptions(cache);
  options.context = 1024;
  options.fillable = true;
  return options;
}

TEST(Fill, OfOnePieceIsTheSameAsDecodingIt) {
  const auto model = LoadRandom(MakeRandomModel("llama"));
  const int vocabulary = model->info().vocabulary;
  const auto piece = RandomTokens(90, vocabulary, 1), next = RandomTokens(20, vocabulary, 2);
  for (const char* cache :
       {"fp32", "palu", "llama:f32", "llama:f16", "llama:f16,fa=off", "llama:q8_0/q4_0"}) {
    Session filled(model, Fillable(cache)), decoded(model, Fillable(cache));
    filled.FillForBenchmark(piece, 90);
    EXPECT_EQ(filled.position(), 90);
    decoded.Decode(piece);
    const auto expected = LastLogits(decoded, next), got = LastLogits(filled, next);
    EXPECT_LT(Compare(expected, got, vocabulary).max, 1e-4) << cache;
  }
}

// Two ways that have nothing in common but the rows they repeat.
TEST(Fill, OfManyPiecesIsTheSameForOursAndLlamas) {
  const auto model = LoadRandom(MakeRandomModel("llama"));
  const int vocabulary = model->info().vocabulary;
  const auto piece = RandomTokens(100, vocabulary, 1), next = RandomTokens(20, vocabulary, 2);
  Session ours(model, Fillable("fp32"));
  ours.FillForBenchmark(piece, 730);
  const auto expected = LastLogits(ours, next);
  Session once(model, Fillable("fp32"));
  once.FillForBenchmark(piece, 100);
  EXPECT_GT(Compare(expected, LastLogits(once, next), vocabulary).max, 1e-2);
  for (const char* cache : {"llama:f32", "llama:f32,fa=off"}) {
    Session theirs(model, Fillable(cache));
    theirs.FillForBenchmark(piece, 730);
    EXPECT_EQ(theirs.position(), 730);
    // With flash attention llama.cpp casts K and V to f16.
    const double bound = std::string(cache).ends_with("off") ? 1e-4 : 2e-2;
    EXPECT_LT(Compare(expected, LastLogits(theirs, next), vocabulary).max, bound) << cache;
  }
}

TEST(Fill, RepeatsTheRowsOfThePiece) {
  const auto model = LoadRandom(MakeRandomModel("llama"));
  const auto piece = RandomTokens(64, model->info().vocabulary);
  Session session(model, Fillable("fp32"));
  session.FillForBenchmark(piece, 150);
  const KVCache::KV kv = session.caches()[1].Reconstruct();
  const int64_t dim = kv.k.shape[3];
  ASSERT_EQ(kv.k.shape[2], 150);
  for (int64_t h = 0; h < kv.k.shape[1]; ++h) {
    const float *k = kv.k.f32() + h * 150 * dim, *v = kv.v.f32() + h * 150 * dim;
    EXPECT_EQ(std::memcmp(k, k + 64 * dim, 64 * dim * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(v + 10 * dim, v + 138 * dim, 12 * dim * sizeof(float)), 0);
    EXPECT_NE(std::memcmp(k, k + dim, dim * sizeof(float)), 0);
  }
}

TEST(Fill, CanBeTrimmedBackTo) {
  const auto model = LoadRandom(MakeRandomModel("llama"));
  const int vocabulary = model->info().vocabulary;
  const auto piece = RandomTokens(128, vocabulary, 1), next = RandomTokens(40, vocabulary, 2);
  for (const char* cache : {"fp16", "palu:bits=auto:4", "llama:f16", "llama:q4_0"}) {
    Session session(model, Fillable(cache));
    session.FillForBenchmark(piece, 600);
    const auto first = LastLogits(session, next);
    session.Trim(40);
    EXPECT_EQ(session.position(), 600);
    // What palu has encoded on the way comes back decoded.
    const double bound = std::string(cache).starts_with("palu") ? 0.1 : 1e-4;
    EXPECT_LT(Compare(first, LastLogits(session, next), vocabulary).max, bound) << cache;
  }
}

TEST(Fill, WorksForSlidingWindows) {
  const auto model = LoadRandom(MakeRandomModel("gemma3"));
  const int vocabulary = model->info().vocabulary;
  const auto piece = RandomTokens(128, vocabulary, 1), next = RandomTokens(20, vocabulary, 2);
  Session ours(model, Fillable("fp32")), theirs(model, Fillable("llama:f32,fa=off"));
  ours.FillForBenchmark(piece, 600);
  theirs.FillForBenchmark(piece, 600);
  const Difference d = Compare(LastLogits(ours, next), LastLogits(theirs, next), vocabulary);
  EXPECT_LT(d.rms, 1e-3 * d.spread) << ToString(d);
}

TEST(Fill, RefusesWhatCannotBe) {
  const auto model = LoadRandom(MakeRandomModel("llama"));
  const auto piece = RandomTokens(64, model->info().vocabulary);
  const auto long_piece = RandomTokens(600, model->info().vocabulary);
  for (const char* cache : {"fp16", "llama:f16"}) {
    Session session(model, Fillable(cache));
    EXPECT_THROW(session.FillForBenchmark({}, 100), InputError);
    EXPECT_THROW(session.FillForBenchmark(long_piece, 1000), InputError);
    EXPECT_THROW(session.FillForBenchmark(piece, -1), InputError);
    session.FillForBenchmark(piece, 0);
    EXPECT_EQ(session.position(), 0);
    session.Decode(piece);
    EXPECT_THROW(session.FillForBenchmark(piece, 100), StateError);
    session.Clear();
    SessionOptions plain = Fillable(cache);
    plain.fillable = false;
    Session other(model, plain);
    EXPECT_THROW(other.FillForBenchmark(piece, 100), StateError);
  }
  Session native(model, Fillable("llama:f16"));
  EXPECT_THROW(native.FillForBenchmark(piece, 5000), StateError);
  EXPECT_EQ(native.position(), 0);
  SessionOptions limited = Fillable("fp16");
  limited.kv_memory = 1 << 20;
  Session own(model, limited);
  EXPECT_THROW(own.FillForBenchmark(piece, 100000), MemoryError);
  EXPECT_EQ(own.position(), 0);
  own.FillForBenchmark(piece, 200);  // and it still works
  EXPECT_EQ(own.position(), 200);
}

}  // namespace
}  // namespace palu::llama
