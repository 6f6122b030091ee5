// The verb `eval`: quality of caches at their stored size, on a text, next to each other.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "eval/cells.h"
#include "eval/eval_report.h"
#include "eval/greedy.h"
#include "eval/load_model.h"
#include "eval/needle.h"
#include "eval/options.h"
#include "eval/page_spectra.h"
#include "eval/protocol.h"
#include "eval/sha256.h"
#include "files.h"
#include "interrupt.h"
#include "palu/errors.h"
#include "progress.h"
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
    "32,768 tokens. exact = tokens kept in fp16. +- is the standard error over chunks. With --json "
    "FILE every finished chunk is kept in FILE.part: the same command again, or one with more "
    "caches or chunks, measures only what is missing.";

// Beside the file of --json, unless that is a device or the like; "" without.
std::string PartPath(const EvalOptions& o) {
  const std::filesystem::path json = o.json;
  const bool special = std::filesystem::exists(json) && !std::filesystem::is_regular_file(json);
  return o.json.empty() || special ? "" : o.json + ".part";
}

// Every output is tried before any work.
void CheckOutputs(const EvalOptions& o) {
  for (const std::string& path : {o.json, PartPath(o), o.html}) {
    if (!path.empty()) CheckWritable(path);
  }
}

EvalKey KeyOf(const EvalOptions& o, const std::string& text) {
  EvalKey key;
  key.model = std::filesystem::path(o.model).filename();
  if (!o.json.empty() || !o.html.empty()) {
    Note note("reading the model's checksum");
    key.model_sha256 = Sha256OfFile(o.model);
    key.text_sha256 = Sha256Of(text);
  }
  key.ctx = o.context;
  key.batch = o.batch;
  key.mode = o.mode;
  key.weights = o.weights;
  key.version = PALU_VERSION;
  return key;
}

void TellWhatIsLeft(const std::vector<EvalRow>& rows, const std::vector<Chunk>& chunks,
                    const CellStore& store) {
  int64_t found = 0;
  for (const EvalRow& row : rows) {
    for (size_t c = 0; c < chunks.size(); ++c) {
      found += store.cells.contains({row.resolved, static_cast<int64_t>(c)});
    }
  }
  if (found == 0) return;
  const auto all = static_cast<int64_t>(rows.size() * chunks.size());
  spdlog::info("{} of {} cells (cache x chunk) were measured before, {} to do", found, all,
               all - found);
}

void TellWhatIsMissing(const EvalResults& results, size_t chunks) {
  if (chunks == 0) return;  // none was asked for
  for (const EvalRow& row : results.unmeasured) {
    spdlog::warn("{}: no chunk is finished, so it has no row", row.cache);
  }
  if (!results.rows.empty() && results.chunks < static_cast<int64_t>(chunks)) {
    spdlog::warn("{} of {} chunks are finished for all rows", results.chunks, chunks);
  }
}

// Runs all checks that were asked for. False after Ctrl-C.
bool Measure(const std::shared_ptr<const llama::Model>& model, const EvalOptions& o,
             const std::vector<EvalRow>& rows, const std::vector<Chunk>& chunks,
             const std::string& text, CellStore& store) {
  return MeasureCells(model, o, rows, chunks, store.cells, [&] { store.Save(); }) &&
         (!o.needle || MeasureNeedle(model, o, rows, text, store)) &&
         (o.greedy == 0 || MeasureGreedy(model, o, rows, text, store));
}

int Eval(const EvalOptions& o) {
  CheckOutputs(o);
  const std::vector<EvalRow> rows = EvalRows(o);
  const std::string text = ReadText(o.file);
  const std::shared_ptr<const llama::Model> model = LoadEvalModel(o);
  const std::vector<Chunk> chunks = CutChunks(*model, o, text);
  if (o.chunks > 0) WarnBeyondTraining(*model, o.context);
  CheckNeedle(*model, o, text);
  CheckGreedy(*model, o, text);
  CellStore store(PartPath(o), KeyOf(o, text));
  TellWhatIsLeft(rows, chunks, store);
  CatchInterrupt();
  const bool whole = Measure(model, o, rows, chunks, text, store);
  const EvalResults results = SumUp(rows, store.cells, static_cast<int64_t>(chunks.size()));
  TellWhatIsMissing(results, chunks.size());
  WriteOut(ReportText(o, rows, results, store));
  if (!whole && results.rows.empty() && store.notes.empty()) return kInterruptedExit;
  if (!o.json.empty()) WriteJson(o.json, ReportJson(o, rows, results, store));
  if (!o.html.empty()) {
    EvalPage page = ReportPage(o, rows, results, store);
    if (!chunks.empty()) page.spectra = MeasureSpectra(model, o, chunks[0]);
    WriteFile(o.html, ToHtml(page));
  }
  return whole ? 0 : kInterruptedExit;
}

// Checks what goes together, and fills in what follows.
void Resolve(EvalOptions& o, bool batch_given) {
  if (o.mode == "decode") {
    if (batch_given && o.batch != 1) {
      throw UsageError("--mode decode is --batch 1; another --batch does not go with it");
    }
    o.batch = 1;
  }
  if (o.chunks == 0 && !o.needle && o.greedy == 0) {
    throw UsageError("there is nothing to measure: --chunks 0 without --needle or --greedy");
  }
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
  verb->add_option("--chunks", o.chunks, "Chunks of the text; 0 = only the other checks")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 20).description(""))
      ->type_name("N");
  const CLI::Option* batch =
      verb->add_option("--batch", o.batch,
                       "Tokens per batch in the scored half; 1 = as in generation")
          ->capture_default_str()
          ->check(CLI::Range(1, 512).description(""))
          ->type_name("N");
  verb->add_option(
          "--mode", o.mode,
          "How the second half is scored: in batches, or decode = token by token, which is "
          "what generation sees")
      ->capture_default_str()
      ->check(CLI::IsMember({"batch", "decode"}))
      ->type_name("");
  verb->add_option("--weights", o.weights,
                   "The model's weights as in its file, or expanded to f32 (temporarily, on disk): "
                   "8-bit activations of quantised weights amplify rounding into a noise floor "
                   "that hides caches near q8_0")
      ->capture_default_str()
      ->check(CLI::IsMember({"file", "f32"}))
      ->type_name("");
  verb->add_flag("--needle", o.needle,
                 "Also ask for pass keys hidden in the text at 0 to 100 % of several lengths");
  verb->add_option("--needle-ctx", o.needle_contexts, "Those lengths, in tokens")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(256, 1 << 24).description(""))
      ->type_name("N,N,...");
  verb->add_option("--greedy", o.greedy,
                   "Also compare 128 tokens written greedily after so many prompts with the fp16 "
                   "cache's; 20 without a number")
      ->expected(0, 1)
      ->default_str("20")
      ->check(CLI::Range(1, 1 << 20).description(""))
      ->type_name("N");
  verb->add_option("-t,--threads", o.threads, "Threads; 0 = all cores")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024).description(""))
      ->type_name("N");
  verb->add_option("--json", o.json, "Write the rows to this file")->type_name("FILE");
  verb->add_option("--html", o.html, "Write a page with table and plots to this file")
      ->type_name("FILE");
  verb->callback([options, batch, &action] {
    Resolve(*options, batch->count() > 0);
    action = [options] { return Eval(*options); };
  });
}

}  // namespace palu::app
