#include "llama/self_test.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <vector>

#include "llama/context.h"
#include "llama/driver.h"
#include "llama/hooks.h"
#include "llama/log.h"
#include "palu/builder.h"
#include "palu/errors.h"

namespace palu::llama {
namespace {

constexpr int kTokens = 24;
constexpr int kUbatch = 64;
// Windows up to this length are filled, so that their edge is under test. Longer ones are not: it
// would take as many tokens as they are long; the probe at load has seen their masks.
constexpr int kLongestWindow = 64;
// Error of one layer's output, relative to it. llama.cpp's keys, values and sums of values are fp16
// there: 1e-3.
constexpr double kLayerTolerance = 0.01;
// Difference of the logits, relative to their standard deviation; see the header for why it is
// wide.
constexpr double kLogitTolerance = 0.25;

std::vector<Token> MakeTokens(const Model::Impl& model) {
  const int window = llama_model_n_swa(model.model.get());
  const int n = window > 0 && window <= kLongestWindow ? std::max(kTokens, window + 16) : kTokens;
  std::vector<Token> tokens(n);
  uint32_t state = 1;
  for (Token& token : tokens) {
    state = state * 1664525u + 1013904223u;  // Numerical Recipes' generator
    token = static_cast<Token>((state >> 8) % static_cast<uint32_t>(model.info.vocabulary));
  }
  if (model.has_tokenizer() && llama_vocab_bos(model.vocab) >= 0)
    tokens[0] = llama_vocab_bos(model.vocab);
  return tokens;
}

double Rms(std::span<const float> x) {
  double sum = 0;
  for (const float value : x) sum += double{value} * value;
  return std::sqrt(sum / static_cast<double>(x.size()));
}

double RmsDifference(std::span<const float> x, std::span<const float> y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += (double{x[i]} - y[i]) * (double{x[i]} - y[i]);
  return std::sqrt(sum / static_cast<double>(x.size()));
}

double StandardDeviation(std::span<const float> x) {
  double sum = 0;
  for (const float value : x) sum += value;
  const double mean = sum / static_cast<double>(x.size()), rms = Rms(x);
  return std::sqrt(std::max(0.0, rms * rms - mean * mean));
}

std::string Describe(const std::string& what, double error, double size) {
  char numbers[80];
  std::snprintf(numbers, sizeof numbers, " differ by %.3g, at a size of %.3g", error, size);
  return what + " with our attention and with llama.cpp's own" + numbers;
}

struct RunResult {
  std::vector<float> logits;  // [tokens, vocabulary]
  std::string layer_error;    // of the first layer that is off, if any
};

// The tokens in three batches: several, one on its own, the rest.
RunResult Run(const Model::Impl& model, const std::vector<Token>& tokens, bool shadow,
              int threads) {
  ModelShape shape = model.shape;
  shape.threads = AttentionThreads(threads);
  std::vector<KVCache> caches = KVCacheBuilder::ForModel(shape, KVCacheConfig::Parse("fp32"));
  Hooks hooks(model.layers, caches);
  Context context(model.model.get(), {.cells = 256,
                                      .ubatch = kUbatch,
                                      .threads = threads,
                                      .callback = Hooks::Callback,
                                      .callback_data = &hooks});
  RunResult result;
  if (shadow) {
    hooks.set_shadow([&result](int layer, std::span<const float> theirs,
                               std::span<const float> ours) {
      const double size = Rms(theirs), error = RmsDifference(theirs, ours);
      if (error <= kLayerTolerance * size || !result.layer_error.empty()) return;
      result.layer_error = Describe("the outputs of layer " + std::to_string(layer), error, size);
    });
  }
  const std::array<size_t, 4> cuts = {0, 11, 12, tokens.size()};
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const auto batch = std::span(tokens).subspan(cuts[i], cuts[i + 1] - cuts[i]);
    const ErrorLog log;
    hooks.Begin(static_cast<int64_t>(cuts[i]), static_cast<int>(batch.size()));
    const int code = context.Decode(batch, static_cast<int64_t>(cuts[i]), LogitRows::kAll);
    if (!shadow) context.Clear();
    hooks.End(code == 0);
    if (code != 0) ThrowDecodeError(code, log.suffix());
    const float* logits = llama_get_logits(context.get());
    result.logits.insert(result.logits.end(), logits,
                         logits + batch.size() * model.info.vocabulary);
  }
  return result;
}

std::string Verdict(const Model::Impl& model, int threads) {
  const std::vector<Token> tokens = MakeTokens(model);
  const RunResult theirs = Run(model, tokens, /*shadow=*/true, threads);
  if (!theirs.layer_error.empty()) return theirs.layer_error;
  const RunResult ours = Run(model, tokens, /*shadow=*/false, threads);
  const double error = RmsDifference(theirs.logits, ours.logits),
               size = StandardDeviation(theirs.logits);
  if (!(error <= kLogitTolerance * size))
    return Describe("the logits", error, size);  // NaN as well
  return "";
}

}  // namespace

std::string SelfTest(const Model::Impl& model, int threads) {
  const std::lock_guard lock(model.self_test_mutex);
  if (!model.self_test) {
    try {
      model.self_test = Verdict(model, threads);
    } catch (const MemoryError&) {
      throw;  // says nothing about the model
    } catch (const Error& error) {
      model.self_test = error.what();
    }
  }
  return *model.self_test;
}

}  // namespace palu::llama
