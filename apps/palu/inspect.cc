// The verb `inspect`: the spectra of K and V of a text, as a table, JSON and a plot.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "files.h"
#include "generate.h"
#include "interrupt.h"
#include "palu/palu.h"
#include "progress.h"
#include "run_options.h"
#include "spectra.h"
#include "spectra_collector.h"
#include "spectra_svg.h"
#include "verbs.h"

namespace palu::app {
namespace {

constexpr char kFooter[] =
    "Keys are shown twice: as the cache gets them, rotated by RoPE, and un-rotated with their "
    "moments averaged over all positions of the context, which is what a basis is fitted on.";

struct InspectOptions {
  std::string model, file, json, svg;
  int groups = 4;
  int threads = 0;
  int64_t max_tokens = 4096;  // 0 = all
  int64_t context = 0;        // 0 = the model's training context
};

std::vector<llama::Token> TextTokens(const llama::Model& model, const InspectOptions& o,
                                     const std::string& text) {
  std::vector<llama::Token> tokens = model.Tokenize(text, true, false);
  if (tokens.empty()) throw InputError(fmt::format("{} has no tokens", o.file));
  const auto all = static_cast<int64_t>(tokens.size());
  if (o.max_tokens > 0 && all > o.max_tokens) {
    spdlog::info("{} has {} tokens, the first {} are used (--max-tokens)", o.file, all,
                 o.max_tokens);
    tokens.resize(o.max_tokens);
  }
  return tokens;
}

int Inspect(const InspectOptions& o) {
  for (const std::string& path : {o.json, o.svg}) {
    if (!path.empty()) CheckWritable(path);
  }
  const std::string text = ReadText(o.file);
  if (text.empty()) throw InputError(fmt::format("{} is empty", o.file));
  RunOptions run;
  run.model = o.model;
  // Exact keys and values: those of a packed cache would show its errors from the second layer on.
  run.cache = "fp16";
  run.context = o.context;
  run.threads = o.threads;
  const std::shared_ptr<const llama::Model> model = LoadModel(run);
  const std::vector<llama::Token> tokens = TextTokens(*model, o, text);
  const auto count = static_cast<int64_t>(tokens.size());
  CheckFits(*model, run, count);
  const std::unique_ptr<llama::Session> session = OpenSession(model, run, count);
  SpectraCollector collector(o.groups);
  session->SetObserver(collector.Observer());
  CatchInterrupt();
  if (!FeedPrompt(*session, tokens).whole) return kInterruptedExit;

  SpectraReport report;
  report.model = o.model;
  report.file = o.file;
  report.tokens = count;
  report.context = o.context > 0 ? o.context : model->info().train_context;
  report.layers = collector.Spectra(report.context);
  WriteOut(ToTable(report));
  if (!o.json.empty()) WriteJson(o.json, ToJson(report));
  if (!o.svg.empty()) WriteFile(o.svg, ToSvg(report));
  return 0;
}

}  // namespace

void AddInspect(CLI::App& app, Action& action) {
  auto options = std::make_shared<InspectOptions>();
  InspectOptions& o = *options;
  CLI::App* verb =
      app.add_subcommand("inspect", "Show the spectrum of K and V per layer and head group");
  verb->footer(kFooter);
  verb->add_option("-m,--model", o.model, "GGUF file")->required()->type_name("FILE");
  verb->add_option("-f,--file", o.file, "Text; - = standard input")->required()->type_name("FILE");
  verb->add_option("-g,--groups", o.groups, "Head groups; at most the number of KV heads")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 16).description(""))
      ->type_name("N");
  verb->add_option("--max-tokens", o.max_tokens, "Use so many tokens of the text; 0 = all")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 30).description(""))
      ->type_name("N");
  verb->add_option("--ctx", o.context,
                   "Positions to average un-rotated keys over; 0 = what the model was trained for")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 30).description(""))
      ->type_name("N");
  verb->add_option("-t,--threads", o.threads, "Threads; 0 = all cores")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024).description(""))
      ->type_name("N");
  verb->add_option("--json", o.json, "Write spectra and ranks to this file")->type_name("FILE");
  verb->add_option("--svg", o.svg, "Write a plot to this file")->type_name("FILE");
  verb->callback([options, &action] { action = [options] { return Inspect(*options); }; });
}

}  // namespace palu::app
