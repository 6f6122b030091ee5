#include "bench/model_row.h"

#include <fmt/format.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench/model_options.h"
#include "kv_estimate.h"
#include "llama/session.h"
#include "measure.h"
#include "palu/errors.h"
#include "run_options.h"
#include "sizes.h"
#include "verbs.h"

namespace palu::app {
namespace {

using llama::Token;

constexpr int64_t kPiece = 512;  // tokens that are computed to fill a depth
constexpr int64_t kWarmUp = 32;  // prompt tokens before the clock starts
constexpr char kText[] =
    "The harbour wakes before the town does. At four the first boats come in, low in the water, "
    "and "
    "the buyers walk along the quay with torches, looking into every box and saying nothing. By "
    "five the prices are made. What is left goes to the smokehouses behind the church, where the "
    "fires have not been out for sixty years, and from there in paper and string to the shops of "
    "three counties. Nobody wrote down how it should be done; those who know it learned it from "
    "their mothers, and those who do not know it buy it. In winter, when the wind stands on the "
    "harbour mouth and no boat goes out, the buyers sit in the office of the ice factory, drink "
    "tea, and argue about whose grandfather it was that painted the lighthouse red. ";

// A text of ours as often as it takes; made-up tokens where the model has no tokenizer.
std::vector<Token> TextTokens(const llama::Model& model, int64_t n) {
  std::vector<Token> tokens;
  try {
    std::string text;
    // A token has at least a byte.
    for (int line = 1; text.size() < static_cast<size_t>(n) * 8; ++line) {
      text += fmt::format("{}. {}", line, kText);
    }
    tokens = model.Tokenize(text, true, false);
  } catch (const InputError&) {
    const auto vocabulary = static_cast<uint32_t>(model.info().vocabulary);
    uint32_t state = 1;
    for (int64_t i = 0; i < n; ++i) {
      state = state * 1664525u + 1013904223u;  // Numerical Recipes' generator
      tokens.push_back(static_cast<Token>((state >> 8) % vocabulary));
    }
  }
  const size_t first = tokens.size();
  while (tokens.size() < static_cast<size_t>(n)) tokens.push_back(tokens[tokens.size() - first]);
  tokens.resize(n);
  return tokens;
}

int64_t Reach(const ModelBenchOptions& o, int64_t depth) {
  return depth + std::max({o.prompt, o.tokens, kWarmUp});
}

// The longest context of a run, which decides how the model is loaded.
std::shared_ptr<const llama::Model> Load(const ModelBenchOptions& o) {
  const int64_t deepest = *std::max_element(o.depths.begin(), o.depths.end());
  return llama::Model::Load(o.model, {.context = Reach(o, deepest)});
}

llama::SessionOptions SessionOptionsFor(const llama::Model& model, const ModelBenchOptions& o,
                                        const std::string& cache, int64_t reach) {
  RunOptions run;
  run.cache = cache;
  return {.cache = cache,
          .threads = o.threads,
          .context = SessionContext(model, run, reach),
          .fillable = true};
}

// A session at a depth, to which it can go back.
class DepthSession {
 public:
  DepthSession(const std::shared_ptr<const llama::Model>& model, const ModelBenchOptions& o)
      : depth_(o.depths[0]),
        tokens_(TextTokens(*model, kPiece + std::max({o.prompt, o.tokens, kWarmUp}))),
        session_(model, SessionOptionsFor(*model, o, o.caches[0], Reach(o, depth_))) {
    // Filling our caches computes a batch here; llama.cpp's are filled elsewhere. A real prompt has
    // used the buffers of a whole batch, so that they belong to the memory of either.
    if (!session_.own_cache() || depth_ == 0) {
      session_.Decode(std::span<const Token>(tokens_).first(std::min(kPiece, Reach(o, depth_))));
      session_.Clear();
    }
    Fill();
  }

  // Tokens a second of n tokens, all at once or one by one.
  double Prompt(int64_t n) {
    return Measure(n, [&] { session_.Decode(Next(n)); });
  }
  double Decode(int64_t n) {
    return Measure(n, [&] {
      for (int64_t i = 0; i < n; ++i) session_.Decode(Next(n).subspan(i, 1));
    });
  }

 private:
  std::span<const Token> Next(int64_t n) const {
    return std::span<const Token>(tokens_).subspan(kPiece, n);
  }
  void Fill() {
    const auto piece = std::span<const Token>(tokens_).first(kPiece);
    session_.FillForBenchmark(piece, depth_);
  }
  template <typename Call>
  double Measure(int64_t n, const Call& call) {
    const Timer timer;
    call();
    const double rate = Rate(n, timer.Seconds());
    GoBack();
    return rate;
  }
  void GoBack() {
    try {
      session_.Trim(session_.position() - depth_);
    } catch (const StateError&) {  // a sliding window has moved on
      session_.Clear();
      Fill();
    }
  }

  int64_t depth_;
  std::vector<Token> tokens_;
  llama::Session session_;
};

ModelSample MeasureSample(const ModelBenchOptions& o) {
  DepthSession session(Load(o), o);
  // What filling took is not what a run at this depth takes.
#ifdef __GLIBC__
  malloc_trim(0);
#endif
  ForgetPeakRss();
  session.Prompt(std::clamp<int64_t>(o.prompt, 1, kWarmUp));
  session.Decode(1);
  ModelSample sample;
  if (o.prompt > 0) sample.prompt_tok_s = session.Prompt(o.prompt);
  if (o.tokens > 0) sample.decode_tok_s = session.Decode(o.tokens);
  sample.peak_rss_bytes = PeakRssBytes();
  return sample;
}

// Says which row an error is about.
template <typename Call>
auto ForRow(const std::string& row, const Call& call) {
  try {
    return call();
  } catch (const ConfigError& e) {
    throw ConfigError(fmt::format("{}: {}", row, e.what()));
  } catch (const Error& e) {
    throw Error(fmt::format("{}: {}", row, e.what()));
  }
}

}  // namespace

nlohmann::ordered_json ToJson(const ModelSample& sample) {
  return {{"prompt_tok_s", sample.prompt_tok_s},
          {"decode_tok_s", sample.decode_tok_s},
          {"peak_rss_bytes", sample.peak_rss_bytes}};
}

ModelSample ModelSampleFrom(const std::string& text) {
  try {
    const auto json = nlohmann::json::parse(text);
    return {json.at("prompt_tok_s"), json.at("decode_tok_s"), json.at("peak_rss_bytes")};
  } catch (const nlohmann::json::exception& e) {
    throw FormatError(fmt::format("a row's process wrote no figures: {}", e.what()));
  }
}

int BenchModelRow(const ModelBenchOptions& o) {
  const ModelSample sample = ForRow(fmt::format("{} at depth {}", o.caches[0], o.depths[0]),
                                    [&] { return MeasureSample(o); });
  WriteOut(ToJson(sample).dump() + "\n");
  return 0;
}

int CheckModelRows(const ModelBenchOptions& o) {
  const std::shared_ptr<const llama::Model> model = Load(o);
  const int64_t deepest = *std::max_element(o.depths.begin(), o.depths.end());
  for (const std::string& cache : o.caches) {
    ForRow(cache, [&] {
      // An own cache tells its options apart from the model's; one of llama.cpp its types. The
      // smallest will do.
      llama::SessionOptions options = SessionOptionsFor(*model, o, cache, Reach(o, deepest));
      if (cache.starts_with("llama:")) options.context = 1;
      const llama::Session session(model, options);
      return session.position();
    });
    const int64_t needed =
        model->info().file_bytes + EstimateKvBytes(model->shape(), cache, Reach(o, deepest));
    if (const int64_t allowed = AvailableBytes(); needed > allowed) {
      throw MemoryError(
          fmt::format("depth {} with {} needs at least {} for the model and its cache; {} are free",
                      deepest, cache, FormatBytes(needed), FormatBytes(allowed)));
    }
  }
  WarnBeyondTraining(*model, Reach(o, deepest));
  return 0;
}

}  // namespace palu::app
