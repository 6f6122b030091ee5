// The verb `eval`: quality of caches at their stored size, on a text, next to each other.
//
// All caches walk through the same chunk side by side, one batch at a time, so the logits of one
// batch are all that is ever held. The first half of a chunk fills the cache; the second half is
// scored: at every position the distribution of each cache is compared with that of the fp16 cache.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "eval_score.h"
#include "files.h"
#include "generate.h"
#include "interrupt.h"
#include "measure.h"
#include "palu/palu.h"
#include "progress.h"
#include "run_options.h"
#include "verbs.h"

namespace palu::app {
namespace {

constexpr char kFooter[] =
    "KL is that of the fp16 cache's next-token distribution from the cache's, in nats, over the "
    "second half of every "
    "chunk. Stored bits count every byte that a sequence owns.";

struct EvalOptions {
  std::string model, file, json;
  std::vector<std::string> caches;
  int64_t context = 4096, chunks = 4;
  int64_t batch = 64;  // tokens per batch in the scored half: at most so many tokens are seen
                       // exactly beside the window
  int threads = 0;
};

struct Row {
  std::string cache;
  std::unique_ptr<llama::Session> session;
  ScoreSum scores;
  double prompt_seconds = 0, score_seconds = 0;
  int64_t prompt_tokens = 0, scored_tokens = 0;
  llama::SessionStats stats;  // at the end of the last chunk
};

class Evaluation {
 public:
  Evaluation(const EvalOptions& o) : o_(o) {
    RunOptions run;
    run.model = o.model;
    run.context = o.context;
    run.threads = o.threads;
    model_ = LoadModel(run);
    for (const std::string& cache : o.caches) {
      rows_.push_back({});
      rows_.back().cache = cache;
      rows_.back().session = Open(cache);
    }
    reference_ = Open("fp16");
  }

  // False after Ctrl-C.
  bool Run() {
    const std::vector<llama::Token> tokens = model_->Tokenize(ReadText(o_.file), false, false);
    const int64_t bos = model_->info().adds_bos ? 1 : 0;
    const int64_t body = o_.context - bos;
    if (static_cast<int64_t>(tokens.size()) < body) {
      throw InputError(fmt::format("{} has {} tokens; one chunk of --ctx {} needs {}", o_.file,
                                   tokens.size(), o_.context, body));
    }
    const int64_t chunks = std::min<int64_t>(o_.chunks, static_cast<int64_t>(tokens.size()) / body);
    if (chunks < o_.chunks) {
      spdlog::info("{} has {} chunks of {} tokens, fewer than the {} asked for", o_.file, chunks,
                   o_.context, o_.chunks);
    }
    Progress progress("evaluating", chunks * o_.context);
    for (int64_t c = 0; c < chunks; ++c) {
      std::vector<llama::Token> chunk;
      if (bos) chunk = model_->Tokenize("", true, false);
      chunk.insert(chunk.end(), tokens.begin() + c * body, tokens.begin() + (c + 1) * body);
      if (!RunChunk(chunk, c, progress)) return false;
    }
    return true;
  }

  std::string Table() {
    std::string text = fmt::format(
        "{:<44} {:>6} {:>7} {:>8} {:>9} {:>8} {:>8} {:>8} {:>7} {:>9} {:>7} {:>8} {:>8}\n", "cache",
        "bits", "stored", "MiB", "KL", "+-", "median", "99.9%", "top1 %", "ppl", "+-", "prompt/s",
        "score/s");
    for (Row& row : rows_) {
      const nlohmann::ordered_json r = RowJson(row);
      text += fmt::format(
          "{:<44} {:>6.3f} {:>7.3f} {:>8.2f} {:>9.5f} {:>8.5f} {:>8.5f} {:>8.4f} {:>7.2f} {:>9.4f} "
          "{:>7.4f} {:>8.1f} {:>8.1f}\n",
          row.cache, r["code_bits"].get<double>(), r["stored_bits_per_element"].get<double>(),
          r["kv_mib"].get<double>(), r["kl_mean"].get<double>(), r["kl_mean_se"].get<double>(),
          r["kl_median"].get<double>(), r["kl_p999"].get<double>(), r["top1"].get<double>() * 100,
          r["ppl"].get<double>(), r["ppl_se"].get<double>(), r["prompt_tok_s"].get<double>(),
          r["score_tok_s"].get<double>());
    }
    return text;
  }

  nlohmann::ordered_json Json() {
    nlohmann::ordered_json json;
    json["model"] = model_->info().name;
    json["file"] = o_.file;
    json["ctx"] = o_.context;
    json["chunks"] = rows_.empty() ? 0 : rows_[0].scores.chunk_kl.size();
    json["batch"] = o_.batch;
    json["kernel"] = KernelTarget();
    for (Row& row : rows_) json["results"].push_back(RowJson(row));
    return json;
  }

 private:
  std::unique_ptr<llama::Session> Open(const std::string& cache) {
    llama::SessionOptions options;
    options.cache = cache;
    options.threads = o_.threads;
    options.context = o_.context;
    return std::make_unique<llama::Session>(model_, options);
  }

  bool RunChunk(const std::vector<llama::Token>& chunk, int64_t index, Progress& progress) {
    const int64_t half = o_.context / 2;
    const std::span<const llama::Token> all(chunk);
    reference_->Clear();
    reference_->Decode(all.first(half), llama::LogitRows::kNone);
    for (Row& row : rows_) {
      row.session->Clear();
      const Timer timer;
      row.session->Decode(all.first(half), llama::LogitRows::kNone);
      row.prompt_seconds += timer.Seconds();
      row.prompt_tokens += half;
      if (Interrupted()) return false;
    }
    progress.Update(index * o_.context + half);
    std::vector<std::vector<PositionScore>> scores(rows_.size());
    std::vector<ReferenceRow> reference(static_cast<size_t>(o_.batch));
    for (int64_t at = half; at < o_.context - 1; at += o_.batch) {
      const int64_t n = std::min(o_.batch, o_.context - 1 - at);
      reference_->Decode(all.subspan(at, n), llama::LogitRows::kAll);
      for (int64_t i = 0; i < n; ++i) reference[i].Set(reference_->Logits(i));
      for (size_t r = 0; r < rows_.size(); ++r) {
        const Timer timer;
        rows_[r].session->Decode(all.subspan(at, n), llama::LogitRows::kAll);
        rows_[r].score_seconds += timer.Seconds();
        rows_[r].scored_tokens += n;
        for (int64_t i = 0; i < n; ++i) {
          scores[r].push_back(
              ScorePosition(reference[i], rows_[r].session->Logits(i), chunk[at + i + 1]));
        }
      }
      progress.Update(index * o_.context + at + n);
      if (Interrupted()) break;  // what is scored so far still counts
    }
    for (size_t r = 0; r < rows_.size(); ++r) {
      rows_[r].scores.AddChunk(scores[r]);
      rows_[r].stats = rows_[r].session->Stats();
    }
    return !Interrupted();
  }

  nlohmann::ordered_json RowJson(Row& row) {
    const Estimate kl = MeanOverChunks(row.scores.chunk_kl),
                   nll = MeanOverChunks(row.scores.chunk_nll);
    double code_bits = 0, elements = 0;
    for (const CacheStats& layer : row.stats.layers) {
      code_bits += layer.code_bits * static_cast<double>(layer.fp16_bytes);
      elements += static_cast<double>(layer.fp16_bytes);
    }
    nlohmann::ordered_json json;
    json["cache"] = row.cache;
    json["code_bits"] = elements > 0 ? code_bits / elements : row.stats.advertised_bits_per_element;
    json["stored_bits_per_element"] = row.stats.stored_bits_per_element;
    json["kv_mib"] = static_cast<double>(row.stats.kv_bytes) / 1048576;
    json["kl_mean"] = kl.mean;
    json["kl_mean_se"] = kl.standard_error;
    json["kl_median"] = Quantile(row.scores.kl, 0.5);
    json["kl_p999"] = Quantile(row.scores.kl, 0.999);
    json["top1"] = static_cast<double>(row.scores.same_top) /
                   static_cast<double>(std::max<int64_t>(1, row.scores.positions));
    json["ppl"] = std::exp(nll.mean);
    json["ppl_se"] = std::exp(nll.mean) * nll.standard_error;
    json["prompt_tok_s"] = Rate(row.prompt_tokens, row.prompt_seconds);
    json["score_tok_s"] = Rate(row.scored_tokens, row.score_seconds);
    return json;
  }

  const EvalOptions& o_;
  std::shared_ptr<const llama::Model> model_;
  std::unique_ptr<llama::Session> reference_;
  std::vector<Row> rows_;
};

int Eval(const EvalOptions& o) {
  if (!o.json.empty()) CheckWritable(o.json);
  CatchInterrupt();
  Evaluation evaluation(o);
  const bool whole = evaluation.Run();
  WriteOut(evaluation.Table());
  if (!o.json.empty()) WriteJson(o.json, evaluation.Json());
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
      ->check(CLI::Range(64, 1 << 24));
  verb->add_option("--chunks", o.chunks, "Chunks of the text")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  verb->add_option("--batch", o.batch, "Tokens per batch in the scored half; 1 = as in generation")
      ->capture_default_str()
      ->check(CLI::Range(1, 512));
  verb->add_option("-t,--threads", o.threads, "Threads; 0 = all cores")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024));
  verb->add_option("--json", o.json, "Write the rows to this file")->type_name("FILE");
  verb->callback([options, &action] { action = [options] { return Eval(*options); }; });
}

}  // namespace palu::app
