// The verb `fit`: statistics of a model's K, V and Q over a text, for caches with basis=FILE.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "eval/load_model.h"
#include "eval/options.h"
#include "eval/protocol.h"
#include "files.h"
#include "interrupt.h"
#include "palu/palu.h"
#include "progress.h"
#include "run_options.h"
#include "verbs.h"

namespace palu::app {
namespace {

constexpr char kFooter[] =
    "The text should be like what the model will read; 50,000 tokens are plenty. Every chunk is a "
    "context of its own; its first tokens are left out, because caches keep them exact.";

// A side that costs nothing measurable still gets the least bits.
constexpr double kLeastCost = 1e-7;

struct FitOptions {
  std::string model, file, out;
  std::string weights = "f32";
  int64_t context = 2048;      // tokens of a chunk
  int64_t max_tokens = 65536;  // of the text; 0 = all
  int joint_heads = 1;
  int64_t cost_tokens = 2048;  // to measure what layers cost; 0 = do not
  int64_t skip = 4;            // first tokens of every chunk
  int threads = 0;
};

// The rows of x without the first n tokens.
ConstTensor Without(const ConstTensor& x, int64_t n) {
  ConstTensor rest = x;
  rest.data = static_cast<const char*>(x.data) +
              n * x.stride[2] * static_cast<int64_t>(DTypeBytes(x.dtype));
  rest.shape[2] -= n;
  return rest;
}

// Sums moments over the whole text. False after Ctrl-C.
bool Collect(const std::shared_ptr<const llama::Model>& model, const FitOptions& o,
             const std::vector<llama::Token>& tokens, Calibrator& calibrator) {
  RunOptions run;
  run.cache = "fp16";  // exact keys and values
  run.context = o.context;
  run.threads = o.threads;
  const std::unique_ptr<llama::Session> session = OpenSession(model, run, o.context);
  const auto rope_or_null = [](const RopeParams& rope) {
    return rope.inv_freq.empty() ? nullptr : &rope;
  };
  // Tokens of a batch that are to be left out.
  const auto skip = [&](int64_t position) { return std::max<int64_t>(0, o.skip - position); };
  session->SetObserver([&](int layer, const ConstTensor& k, const ConstTensor& v, int64_t position,
                           const RopeParams& rope) {
    const int64_t n = skip(position);
    if (n >= k.shape[2]) return;
    calibrator.AddKeysValues(layer, Without(k, n), Without(v, n), position + n, rope_or_null(rope));
  });
  session->SetQueryObserver(
      [&](int layer, const ConstTensor& q, int64_t position, const RopeParams& rope) {
        const int64_t n = skip(position);
        if (n < q.shape[2]) {
          calibrator.AddQueries(layer, Without(q, n), position + n, rope_or_null(rope));
        }
      });
  const std::vector<llama::Token> bos = model->Tokenize("", true, false);
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t body = o.context - static_cast<int64_t>(bos.size());
  Progress progress("fitting", count);
  for (int64_t at = 0; at < count; at += body) {
    std::vector<llama::Token> chunk = bos;
    chunk.insert(chunk.end(), tokens.begin() + at, tokens.begin() + std::min(at + body, count));
    session->Clear();
    const bool whole = session->Decode(chunk, llama::LogitRows::kNone, [&](int64_t done) {
      progress.Update(std::min(count, at + done));
      return !Interrupted();
    });
    if (!whole) return false;
  }
  return true;
}

// The divergence of every side of every layer when it alone is encoded at 2 bits, on the first
// tokens of the text. The file `o.out` holds the moments already. False after Ctrl-C.
bool MeasureCosts(const std::shared_ptr<const llama::Model>& model, const FitOptions& o,
                  const std::string& text, Calibrator& calibrator) {
  std::vector<int> layers;
  for (const LayerShape& layer : model->shape().layers) {
    if (layer.window == 0) layers.push_back(layer.index);
  }
  EvalOptions eval;
  eval.context = o.cost_tokens;
  eval.chunks = 1;
  eval.batch = 256;  // quick; costs only have to be right beside each other
  eval.threads = o.threads;
  const auto row = [&](int layer, char side) {
    const std::string cache =
        fmt::format("palu:basis={},bits=auto:2,key_metric=queries,key_mean=rotated,only={}{}",
                    o.out, layer, side);
    return EvalRow{cache, cache, false};
  };
  const std::vector<Chunk> chunks = CutChunks(*model, eval, text);
  CellMap cells;
  // A few caches at a time: each has buffers of its own.
  constexpr size_t kLayersAtOnce = 3;
  for (size_t first = 0; first < layers.size(); first += kLayersAtOnce) {
    std::vector<EvalRow> rows;
    for (size_t i = first; i < std::min(first + kLayersAtOnce, layers.size()); ++i) {
      for (const char side : {'k', 'v'}) rows.push_back(row(layers[i], side));
    }
    spdlog::info("what layers cost: {} of {}", first, layers.size());
    if (!MeasureCells(model, eval, rows, chunks, cells, [] {})) return false;
  }
  const auto cost = [&](int layer, char side) {
    const std::vector<float>& kl = cells.at({row(layer, side).resolved, 0}).kl;
    double sum = 0;
    for (const float x : kl) sum += x;
    return std::max(sum / static_cast<double>(kl.size()), kLeastCost);
  };
  for (const int layer : layers) calibrator.SetCosts(layer, cost(layer, 'k'), cost(layer, 'v'));
  return true;
}

int Fit(const FitOptions& o) {
  // A cache is written as options between commas.
  if (o.out.find(',') != std::string::npos) {
    throw UsageError(fmt::format(
        "--output is {}; the path must have no comma, as palu:basis=FILE could not name it",
        o.out));
  }
  CheckWritable(o.out);
  EvalOptions eval;
  eval.model = o.model;
  eval.context = o.context;
  eval.weights = o.weights;
  eval.threads = o.threads;
  const std::shared_ptr<const llama::Model> model = LoadEvalModel(eval);
  const std::string text = ReadText(o.file);
  std::vector<llama::Token> tokens = model->Tokenize(text, false, false);
  if (o.max_tokens > 0 && static_cast<int64_t>(tokens.size()) > o.max_tokens) {
    tokens.resize(o.max_tokens);
  }
  const int64_t least = std::max(o.cost_tokens, 2 * o.skip + 3);
  if (static_cast<int64_t>(tokens.size()) < least) {
    throw InputError(
        fmt::format("{} has {} tokens; a fit needs at least {}", o.file, tokens.size(), least));
  }
  CatchInterrupt();
  Calibrator calibrator(model->shape(), model->shape().model, o.joint_heads);
  if (!Collect(model, o, tokens, calibrator)) return kInterruptedExit;
  calibrator.Save(o.out);
  if (o.cost_tokens > 0) {
    if (!MeasureCosts(model, o, text, calibrator)) {
      spdlog::info("{} is whole, but without what the layers cost", o.out);
      return kInterruptedExit;
    }
    calibrator.Save(o.out);
  }
  spdlog::info("wrote {} from {} tokens; use it with --cache palu:basis={}", o.out, tokens.size(),
               o.out);
  return 0;
}

}  // namespace

void AddFit(CLI::App& app, Action& action) {
  auto options = std::make_shared<FitOptions>();
  FitOptions& o = *options;
  CLI::App* verb =
      app.add_subcommand("fit", "Write a basis file for a model, which caches start from");
  verb->footer(kFooter);
  verb->add_option("-m,--model", o.model, "GGUF file")->required()->type_name("FILE");
  verb->add_option("-f,--file", o.file, "Text; - = standard input")->required()->type_name("FILE");
  verb->add_option("-o,--output", o.out, "Write the basis to this file")
      ->required()
      ->type_name("FILE");
  verb->add_option("--ctx", o.context, "Tokens of a chunk")
      ->capture_default_str()
      ->check(CLI::Range(64, 1 << 24).description(""))
      ->type_name("N");
  verb->add_option("--max-tokens", o.max_tokens, "Use so many tokens of the text; 0 = all")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 30).description(""))
      ->type_name("N");
  verb->add_option("--joint-heads", o.joint_heads,
                   "For caches with so many joint_heads; they may always use 1")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024).description(""))
      ->type_name("N");
  verb->add_option(
          "--cost-tokens", o.cost_tokens,
          "Tokens to measure the cost of every layer on, which bits=auto shares its budget "
          "by; 0 = do not")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 20).description(""))
      ->type_name("N");
  verb->add_option("--skip", o.skip, "First tokens of every chunk to leave out")
      ->capture_default_str()
      ->check(CLI::Range(0, 32).description(""))
      ->type_name("N");
  verb->add_option(
          "--weights", o.weights,
          "Weights as in the model's file, or expanded to f32 (temporarily, on disk): costs "
          "of layers drown in the rounding of quantised weights")
      ->capture_default_str()
      ->check(CLI::IsMember({"file", "f32"}).description(""))
      ->type_name("file|f32");
  verb->add_option("-t,--threads", o.threads, "Threads; 0 = all cores")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024).description(""))
      ->type_name("N");
  verb->callback([options, &action] { action = [options] { return Fit(*options); }; });
}

}  // namespace palu::app
