// File: adapter_test_util.h - logits of plain llama.cpp and of sessions, and their difference.
#ifndef PALU_TESTS_LLAMA_ADAPTER_TEST_UTIL_H_
#define PALU_TESTS_LLAMA_ADAPTER_TEST_UTIL_H_

#include <llama.h>

#include <memory>
#include <string>
#include <vector>

#include "llama/model.h"
#include "llama/session.h"
#include "random_model.h"

namespace palu::llama {

// A path in a directory that is removed when the test program ends.
std::string TempPath(const std::string& name);

// Writes and loads a random model.
std::shared_ptr<const Model> LoadRandom(const RandomModel& model, int64_t context = 0);

std::vector<Token> RandomTokens(int n, int vocabulary, uint32_t seed = 1);

// All logits, [tokens, vocabulary], of plain llama.cpp in an ordinary context (without a callback),
// in batches of `chunk`. Only public functions of llama.cpp are used.
struct PlainOptions {
  int chunk = 512;
  ggml_type type = GGML_TYPE_F32;
  bool flash = false;
  int64_t cells = 0;  // 0 = enough for the tokens
};
std::vector<float> PlainLogits(const Model& model, const std::vector<Token>& tokens,
                               const PlainOptions& options = {});

// The same of a session, in Decode calls of `chunk` tokens each.
std::vector<float> SessionLogits(Session& session, const std::vector<Token>& tokens, int chunk);
SessionOptions CacheOptions(const std::string& cache);

// Both [rows, vocabulary].
struct Difference {
  double max = 0, rms = 0;
  double spread = 0;  // standard deviation of `expected`
  int flips = 0;      // rows whose largest logit is another one
};
Difference Compare(const std::vector<float>& expected, const std::vector<float>& got,
                   int vocabulary);
std::string ToString(const Difference& difference);

}  // namespace palu::llama

#endif  // PALU_TESTS_LLAMA_ADAPTER_TEST_UTIL_H_
