// The verb `eval`: quality of caches at their stored size, on a text, next to each other.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "eval_cells.h"
#include "eval_options.h"
#include "eval_protocol.h"
#include "eval_results.h"
#include "files.h"
#include "interrupt.h"
#include "palu/palu.h"
#include "parallel.h"
#include "run_options.h"
#include "verbs.h"

namespace palu::app {
namespace {

constexpr char kFooter[] =
    "KL is the divergence of a cache's next-token distribution from that of an fp16 cache, in "
    "nats, over the second half of every chunk. A row fp16 is the noise floor: the same cache in "
    "batches of another size, so that its sums run in another order. decode/s is the speed of the "
    "scored half, in batches of --batch tokens (1 = generation). Bits are per element of K and V: "
    "code = codes and scales; stored = every byte of the sequence; at 32k = the same when it has "
    "32,768 tokens. exact = tokens kept in fp16. +- is the standard error over chunks.";

int Eval(const EvalOptions& o) {
  if (!o.json.empty()) CheckWritable(o.json);
  const std::vector<EvalRow> rows = EvalRows(o);
  const std::string text = ReadText(o.file);
  RunOptions run;
  run.model = o.model;
  run.context = o.context;
  const std::shared_ptr<const llama::Model> model = LoadModel(run);
  const std::vector<Chunk> chunks = CutChunks(*model, o, text);
  CatchInterrupt();
  CellMap cells;
  const bool whole = MeasureCells(model, o, rows, chunks, cells, [] {});
  const EvalResults results = SumUp(rows, cells, static_cast<int64_t>(chunks.size()));
  WriteOut(ToTable(results));
  if (!o.json.empty()) {
    nlohmann::ordered_json json;
    json["results"] = ToJson(results);
    WriteJson(o.json, json);
  }
  return whole ? 0 : kInterruptedExit;
}

}  // namespace

void AddEval(CLI::App& app, Action& action) {
  auto options = std::make_shared<EvalOptions>();
  EvalOptions& o = *options;
  CLI::App* verb = app.add_subcommand("eval", "Measure the quality of caches on a text");
  verb->footer(kFooter);
  verb->add_option("-m,--model", o.model, "GGUF file")->required()->type_name("FILE");
  verb->add_option("-f,--file", o.file, "Text; - = standard input")->required()->type_name("FILE");
  verb->add_option("--cache", o.caches, "A cache, as for run; repeat for more rows")
      ->required()
      ->type_name("CACHE");
  verb->add_option("--ctx", o.context, "Tokens of a chunk")
      ->capture_default_str()
      ->check(CLI::Range(64, 1 << 24).description(""))
      ->type_name("N");
  verb->add_option("--chunks", o.chunks, "Chunks of the text")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20).description(""))
      ->type_name("N");
  verb->add_option("--batch", o.batch, "Tokens per batch in the scored half; 1 = as in generation")
      ->capture_default_str()
      ->check(CLI::Range(1, 512).description(""))
      ->type_name("N");
  verb->add_option("-t,--threads", o.threads, "Threads; 0 = all cores")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024).description(""))
      ->type_name("N");
  verb->add_option("--json", o.json, "Write the rows to this file")->type_name("FILE");
  verb->callback([options, &action] { action = [options] { return Eval(*options); }; });
}

}  // namespace palu::app
