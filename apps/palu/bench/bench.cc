// The verb `bench`: speed of the attention alone, and of whole models at depth.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/attention.h"
#include "bench/model_options.h"
#include "files.h"
#include "interrupt.h"
#include "palu/palu.h"
#include "parallel.h"
#include "progress.h"
#include "run_options.h"
#include "sizes.h"
#include "verbs.h"

namespace palu::app {
namespace {

constexpr char kFooter[] =
    "Examples:\n"
    "  palu bench attention --shape 9x3x64,32x8x128 --tokens 1024,8192,32768 --json out.json\n"
    "  palu bench attention --shape 32x8x128 --cache palu --cache palu:small --cache llama:q8_0\n"
    "  palu bench model -m model.gguf --depth 0,4096,32768 --cache llama:f16 --cache palu";

constexpr char kAttentionFooter[] =
    "K and V are made up (neighbours in time alike, few channels strong, RoPE applied) and fill as "
    "many layers as --walk asks for; a sample is one query token (decode: a token's attention "
    "averaged over up to 8 layers in a row) or --prefill of them (one layer). Samples go round the "
    "caches. GB/s counts the stored bytes of a layer, x fp16 = times as fast as the cache fp16, "
    "which is always measured. llama:TYPE[,fa=off] is llama.cpp's attention on its own layout. "
    "PALU_TARGET=NAME forces one target of our kernels.";

constexpr char kModelFooter[] =
    "A sample is a process of its own, so that its peak memory is its own; rounds go over all "
    "caches "
    "of a depth. To fill a depth 512 tokens are computed and their K and V stored again and again "
    "at "
    "positions that go on: what follows costs what it costs, but means nothing. Then one prompt "
    "and "
    "the single tokens are timed, each from the same depth. Given are medians over the rounds, "
    "their "
    "least and largest, and the largest resident memory after the filling, model included.";

int64_t MemoryLimit(const AttentionOptions& o) {
  return o.memory > 0 ? o.memory : AvailableBytes() / 4 * 3;
}

std::optional<MachineLimits> Limits(const AttentionOptions& o, int threads) {
  if (o.no_limits) return std::nullopt;
  MachineLimits limits;
  {
    Note note("measuring the machine");
    limits = MeasureLimits(threads);
  }
  WriteOut(ToText(limits, threads) + "\n");
  return limits;
}

int BenchAttention(AttentionOptions o) {
  CheckAttentionOptions(o);
  if (!o.json.empty()) CheckWritable(o.json);
  std::vector<AttentionPlan> plans;  // all of them, so that what does not fit is said at once
  for (const AttentionShape& shape : o.shapes) {
    for (const int64_t tokens : o.tokens) {
      plans.push_back(PlanAttention(o, shape, tokens, MemoryLimit(o)));
    }
  }
  CatchInterrupt();
  const int threads = ThreadCount(o.threads);
  WriteOut(fmt::format("kernels: {}, threads: {}\n", KernelTarget(), threads));
  const std::optional<MachineLimits> limits = Limits(o, threads);
  std::vector<AttentionRow> rows;
  for (AttentionPlan& plan : plans) {
    if (Interrupted()) break;
    const std::vector<AttentionRow> more = MeasureAttention(plan, o.repeat, threads);
    for (const std::string& note : plan.notes) {
      spdlog::warn("{}, {} tokens: {}", plan.shape.Name(), plan.tokens, note);
    }
    WriteOut(ToText(more) + "\n");
    rows.insert(rows.end(), more.begin(), more.end());
  }
  if (!o.json.empty()) WriteJson(o.json, ToJson(rows, limits));
  return Interrupted() ? kInterruptedExit : 0;
}

void AddAttention(CLI::App* bench, Action& action) {
  auto options = std::make_shared<AttentionOptions>();
  AttentionOptions& o = *options;
  CLI::App* verb = bench->add_subcommand("attention", "Time one layer's attention alone");
  verb->footer(kAttentionFooter);
  verb->add_option_function<std::vector<std::string>>(
          "--shape",
          [options](const std::vector<std::string>& texts) {
            for (const std::string& text : texts) options->shapes.push_back(ParseShape(text));
          },
          "Query heads x KV heads x head size; repeat, or separate by commas")
      ->required()
      ->delimiter(',')
      ->type_name("HxKxD");
  verb->add_option("--tokens", o.tokens, "Tokens of the context")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 24).description(""))
      ->type_name("N,N,...");
  verb->add_option("--cache", o.caches, "A cache, as for run; repeat for more rows")
      ->capture_default_str()
      ->type_name("CACHE");
  verb->add_option("--prefill", o.prefill, "Query tokens of the prefill rows; 0 = decode only")
      ->capture_default_str()
      ->check(CLI::Range(0, 4096).description(""))
      ->type_name("N");
  verb->add_option("--repeat", o.repeat, "Samples of every row at least; short ones get more")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000).description(""))
      ->type_name("N");
  verb->add_option("-t,--threads", o.threads, "Threads; 0 = all cores")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024).description(""))
      ->type_name("N");
  verb->add_option_function<std::string>(
          "--walk", [options](const std::string& text) { options->walk = ParseSize(text); },
          "Bytes of layers to go through before one comes again, so that the CPU's caches do not "
          "help")
      ->default_str("96M")
      ->type_name("SIZE");
  verb->add_option_function<std::string>(
          "--memory", [options](const std::string& text) { options->memory = ParseSize(text); },
          "Limit of all layers together; without it three quarters of what is free")
      ->type_name("SIZE");
  verb->add_flag("--no-limits", o.no_limits, "Do not measure the machine's limits first");
  verb->add_option("--json", o.json, "Write the rows to this file")->type_name("FILE");
  verb->callback([options, &action] { action = [options] { return BenchAttention(*options); }; });
}

// What the verb and the hidden one of its processes share.
void AddModelOptions(CLI::App* verb, ModelBenchOptions& o) {
  verb->add_option("-m,--model", o.model, "GGUF file")->required()->type_name("FILE");
  verb->add_option("--depth", o.depths, "Tokens that are there already")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 26).description(""))
      ->type_name("N,N,...");
  verb->add_option("--cache", o.caches, "A cache, as for run; repeat for more rows")
      ->capture_default_str()
      ->type_name("CACHE");
  verb->add_option("-n,--tokens", o.tokens,
                   "Tokens that are decoded one by one; 32 are a block, so that encoding one "
                   "counts; 0 = none")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 16).description(""))
      ->type_name("N");
  verb->add_option("--prompt", o.prompt, "Tokens of a prompt; 0 = none")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 16).description(""))
      ->type_name("N");
  verb->add_option("-t,--threads", o.threads, "Threads; 0 = all cores")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024).description(""))
      ->type_name("N");
}

void AddModel(CLI::App* bench, Action& action) {
  auto options = std::make_shared<ModelBenchOptions>();
  CLI::App* verb = bench->add_subcommand("model", "Time whole models at depth");
  verb->footer(kModelFooter);
  AddModelOptions(verb, *options);
  verb->add_option("--rounds", options->rounds, "Samples of every row")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000).description(""))
      ->type_name("N");
  verb->add_option("--json", options->json, "Write the rows to this file")->type_name("FILE");
  verb->callback([options, &action] {
    if (options->prompt == 0 && options->tokens == 0) {
      throw UsageError("there is nothing to measure: --prompt 0 and --tokens 0");
    }
    action = [options] { return BenchModel(*options); };
  });
}

void AddModelRow(CLI::App* bench, Action& action) {
  auto options = std::make_shared<ModelBenchOptions>();
  auto check = std::make_shared<bool>(false);
  CLI::App* verb = bench->add_subcommand(kModelRowVerb)->group("");  // not in --help
  AddModelOptions(verb, *options);
  verb->add_flag("--check", *check);
  verb->callback([options, check, &action] {
    action = [options, check] {
      return *check ? CheckModelRows(*options) : BenchModelRow(*options);
    };
  });
}

}  // namespace

void AddBench(CLI::App& app, Action& action) {
  CLI::App* verb = app.add_subcommand("bench", "Time attention, or whole models at depth");
  verb->footer(kFooter);
  AddAttention(verb, action);
  AddModel(verb, action);
  AddModelRow(verb, action);
  // Without a word more it explains itself; that nothing was done shows in the exit code.
  verb->final_callback([verb, &action] {
    if (!verb->get_subcommands().empty()) return;
    action = [verb] {
      WriteOut(verb->help("palu"));
      return kUsageExit;
    };
  });
}

}  // namespace palu::app
