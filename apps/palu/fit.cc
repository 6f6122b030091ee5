// The verb `fit`: statistics of a model's K, V and Q over a text, for caches with basis=FILE.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

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

struct FitOptions {
  std::string model, file, out;
  int64_t context = 2048;      // tokens of a chunk
  int64_t max_tokens = 65536;  // of the text; 0 = all
  int joint_heads = 1;
  int64_t skip = 4;  // first tokens of every chunk
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

int Fit(const FitOptions& o) {
  CheckWritable(o.out);
  RunOptions run;
  run.model = o.model;
  run.cache = "fp16";  // exact keys and values
  run.context = o.context;
  run.threads = o.threads;
  const std::shared_ptr<const llama::Model> model = LoadModel(run);
  std::vector<llama::Token> tokens = model->Tokenize(ReadText(o.file), false, false);
  if (o.max_tokens > 0 && static_cast<int64_t>(tokens.size()) > o.max_tokens) {
    tokens.resize(o.max_tokens);
  }
  const auto count = static_cast<int64_t>(tokens.size());
  if (count <= 2 * o.skip + 2) {
    throw InputError(
        fmt::format("{} has {} tokens; a fit needs at least {}", o.file, count, 2 * o.skip + 3));
  }
  const std::unique_ptr<llama::Session> session = OpenSession(model, run, o.context);
  Calibrator calibrator(model->shape(), model->shape().model, o.joint_heads);
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
  CatchInterrupt();
  const std::vector<llama::Token> bos = model->Tokenize("", true, false);
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
    if (!whole) return kInterruptedExit;
  }
  calibrator.Save(o.out);
  spdlog::info("wrote {} from {} tokens; use it with --cache palu:basis={}", o.out, count, o.out);
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
  verb->add_option("--skip", o.skip, "First tokens of every chunk to leave out")
      ->capture_default_str()
      ->check(CLI::Range(0, 32).description(""))
      ->type_name("N");
  verb->add_option("-t,--threads", o.threads, "Threads; 0 = all cores")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024).description(""))
      ->type_name("N");
  verb->callback([options, &action] { action = [options] { return Fit(*options); }; });
}

}  // namespace palu::app
