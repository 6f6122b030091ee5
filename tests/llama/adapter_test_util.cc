#include "adapter_test_util.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <random>
#include <stdexcept>

namespace palu::llama {
namespace {

struct TempDirectory {
  std::filesystem::path path;
  TempDirectory()
      : path(std::filesystem::temp_directory_path() /
             ("palu_llama_test_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(path);
  }
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

using ContextPtr = std::unique_ptr<llama_context, decltype(&llama_free)>;

void DecodePlain(llama_context* context, const std::vector<Token>& tokens, int64_t first, int n) {
  llama_batch batch = llama_batch_init(n, 0, 1);
  batch.n_tokens = n;
  for (int i = 0; i < n; ++i) {
    batch.token[i] = tokens[first + i];
    batch.pos[i] = static_cast<llama_pos>(first + i);
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = 1;
  }
  const int code = llama_decode(context, batch);
  llama_batch_free(batch);
  if (code != 0) throw std::runtime_error("plain llama_decode returned " + std::to_string(code));
}

}  // namespace

std::string TempPath(const std::string& name) {
  static const TempDirectory directory;
  return (directory.path / name).string();
}

std::shared_ptr<const Model> LoadRandom(const RandomModel& model, int64_t context) {
  static int count = 0;
  const std::string path = TempPath(model.architecture + std::to_string(count++) + ".gguf");
  WriteRandomModel(model, path);
  return Model::Load(path, {.context = context});
}

std::vector<Token> RandomTokens(int n, int vocabulary, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Token> tokens(n);
  for (Token& token : tokens)
    token = static_cast<Token>(random() % static_cast<uint32_t>(vocabulary));
  return tokens;
}

std::vector<float> PlainLogits(const Model& model, const std::vector<Token>& tokens,
                               const PlainOptions& options) {
  const auto n = static_cast<int64_t>(tokens.size());
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<uint32_t>(options.cells > 0 ? options.cells : (n + 255) / 256 * 256);
  params.n_batch = params.n_ubatch = static_cast<uint32_t>(options.chunk);
  params.n_threads = params.n_threads_batch = 1;
  params.type_k = params.type_v = options.type;
  params.flash_attn_type =
      options.flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  const ContextPtr context(llama_init_from_model(model.handle(), params), llama_free);
  if (!context) throw std::runtime_error("no plain context");
  const int64_t vocabulary = model.info().vocabulary;
  std::vector<float> logits(n * vocabulary);
  for (int64_t i = 0; i < n; i += options.chunk) {
    const int batch = static_cast<int>(std::min<int64_t>(options.chunk, n - i));
    DecodePlain(context.get(), tokens, i, batch);
    std::copy_n(llama_get_logits(context.get()), batch * vocabulary,
                logits.begin() + i * vocabulary);
  }
  return logits;
}

SessionOptions CacheOptions(const std::string& cache) {
  SessionOptions options;
  options.cache = cache;
  options.threads = 1;  // the models are so small that a second thread only waits
  return options;
}

std::vector<float> SessionLogits(Session& session, const std::vector<Token>& tokens, int chunk) {
  std::vector<float> logits;
  logits.reserve(tokens.size() * session.model().info().vocabulary);
  for (size_t i = 0; i < tokens.size(); i += chunk) {
    const size_t n = std::min<size_t>(chunk, tokens.size() - i);
    session.Decode(std::span(tokens).subspan(i, n), LogitRows::kAll);
    for (int64_t row = 0; row < session.logit_rows(); ++row) {
      const std::span<const float> values = session.Logits(row);
      logits.insert(logits.end(), values.begin(), values.end());
    }
  }
  return logits;
}

Difference Compare(const std::vector<float>& expected, const std::vector<float>& got,
                   int vocabulary) {
  EXPECT_EQ(expected.size(), got.size());
  Difference d;
  if (expected.size() != got.size()) {
    d.max = INFINITY;
    return d;
  }
  double sum = 0, squares = 0, errors = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = std::abs(double{expected[i]} - got[i]);
    if (!(error <= d.max) && !std::isnan(d.max)) d.max = error;  // a NaN stays
    errors += error * error;
    sum += expected[i];
    squares += double{expected[i]} * expected[i];
  }
  const auto n = static_cast<double>(expected.size());
  d.rms = std::sqrt(errors / n);
  d.spread = std::sqrt(squares / n - sum / n * (sum / n));
  for (size_t row = 0; row < expected.size(); row += vocabulary) {
    const auto largest = [&](const std::vector<float>& x) {
      return std::max_element(x.begin() + row, x.begin() + row + vocabulary) - x.begin();
    };
    d.flips += largest(expected) != largest(got);
  }
  return d;
}

std::string ToString(const Difference& d) {
  char text[120];
  std::snprintf(text, sizeof text, "max %.3g rms %.3g flips %d (spread %.3g)", d.max, d.rms,
                d.flips, d.spread);
  return text;
}

}  // namespace palu::llama
