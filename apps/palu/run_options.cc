#include "run_options.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "files.h"
#include "generate.h"
#include "kv_estimate.h"
#include "measure.h"
#include "palu/palu.h"
#include "progress.h"
#include "sizes.h"

namespace palu::app {

std::string PromptText(const RunOptions& o) {
  std::string text = o.file.empty() ? std::string() : ReadText(o.file);
  RequireUtf8(o.prompt, "the text of --prompt");
  RequireUtf8(o.system, "the text of --system");
  if (!text.empty() && !o.prompt.empty()) text += "\n\n";
  return text + o.prompt;
}

int64_t SessionContext(const llama::Model& model, const RunOptions& o, int64_t reach) {
  if (o.context > 0) return o.context;
  const int64_t trained = model.info().train_context;
  // llama.cpp reserves its whole context at once, so its cache gets what the run needs and no more.
  // Ours grow; their fit depends on the context, which must not change with the answer's length.
  if (o.cache.starts_with("llama:") && reach > 0) return reach;
  return std::max(trained, reach);
}

std::shared_ptr<const llama::Model> LoadModel(const RunOptions& o) {
  Note note("loading the model");
  return llama::Model::Load(o.model, {.context = o.context});
}

void CheckFits(const llama::Model& model, const RunOptions& o, int64_t reach) {
  if (o.context > 0 && reach > o.context) {
    throw InputError(
        fmt::format("the run reaches {} tokens ({} of them for the answer), --ctx allows {}", reach,
                    o.tokens, o.context));
  }
  if (o.kv_memory == 0) return;
  const int64_t bytes = EstimateKvBytes(model.shape(), o.cache, reach);
  if (bytes > o.kv_memory) {
    throw MemoryError(fmt::format(
        "{} tokens ({} of them for the answer) need at least {} of KV cache with {}, --kv-memory "
        "allows {}",
        reach, o.tokens, FormatBytes(bytes), o.cache, FormatBytes(o.kv_memory)));
  }
}

bool WarnBeyondTraining(const llama::Model& model, int64_t reach) {
  const int64_t trained = model.info().train_context;
  if (trained == 0 || reach <= trained) return false;
  spdlog::warn("the model was trained for {} tokens, this run reaches {}", trained, reach);
  return true;
}

std::unique_ptr<llama::Session> OpenSession(std::shared_ptr<const llama::Model> model,
                                            const RunOptions& o, int64_t reach) {
  WarnBeyondTraining(*model, reach);
  const int64_t context = SessionContext(*model, o, reach);
  if (context != (o.context > 0 ? o.context : model->info().train_context)) {
    RunOptions other = o;
    other.context = context;
    model.reset();
    model = LoadModel(other);  // LongRoPE chooses its factors by the context
  }
  Note note("preparing the cache");
  return std::make_unique<llama::Session>(
      std::move(model),
      llama::SessionOptions{
          .cache = o.cache, .threads = o.threads, .context = context, .kv_memory = o.kv_memory});
}

Sampler MakeSampler(const llama::Model& model, const RunOptions& o) {
  Sampler sampler(o.sampler);
  if (o.ignore_eos) sampler.Ban(EndTokens(model));
  return sampler;
}

RunReport ReportOf(const llama::Session& session, const RunOptions& o) {
  RunReport report;
  report.model = o.model;
  report.cache = session.cache_text();
  report.kernels = session.own_cache() ? KernelTarget() : "llama.cpp";
  report.threads =
      o.threads > 0 ? o.threads : static_cast<int>(std::thread::hardware_concurrency());
  report.stats = session.Stats();
  report.peak_rss_bytes = PeakRssBytes();
  return report;
}

void WriteOut(std::string_view text) { WriteAll(STDOUT_FILENO, text, "standard output"); }

}  // namespace palu::app
