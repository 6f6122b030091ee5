// File: run_options.h - what `palu run` was asked for, and the steps that one run and a chat share.
#ifndef PALU_APPS_RUN_OPTIONS_H_
#define PALU_APPS_RUN_OPTIONS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "llama/session.h"
#include "report.h"
#include "sampler.h"

namespace palu::app {

struct RunOptions {
  std::string model, file, prompt, system, json;
  std::string cache = "palu";
  int64_t tokens = 256;   // per answer
  int64_t context = 0;    // 0 = the model's training context
  int64_t kv_memory = 0;  // bytes; 0 = no limit
  int threads = 0;        // 0 = all cores
  bool raw = false, ignore_eos = false, interactive = false;
  SamplerOptions sampler;
};

// The text of --file and -p, with an empty line between them. Errors: FormatError, InputError.
std::string PromptText(const RunOptions& options);

// Positions that the session is made for. reach: tokens of the run when they are known, else 0.
int64_t SessionContext(const llama::Model& model, const RunOptions& options, int64_t reach);

// For options.context.
std::shared_ptr<const llama::Model> LoadModel(const RunOptions& options);

// Throws InputError or MemoryError when `reach` tokens cannot fit --ctx or, by an estimate,
// --kv-memory.
void CheckFits(const llama::Model& model, const RunOptions& options, int64_t reach);

// A warning when the model has never seen texts of `reach` tokens. Returns whether there was one.
bool WarnBeyondTraining(const llama::Model& model, int64_t reach);

// Loads the model anew when it was loaded for another context than SessionContext.
std::unique_ptr<llama::Session> OpenSession(std::shared_ptr<const llama::Model> model,
                                            const RunOptions& options, int64_t reach);

Sampler MakeSampler(const llama::Model& model, const RunOptions& options);

// The parts of a report that the session knows.
RunReport ReportOf(const llama::Session& session, const RunOptions& options);

// Writes to standard output at once.
void WriteOut(std::string_view text);

// Talks until /exit, the end of input or Ctrl-C. Returns the exit code.
int Chat(const RunOptions& options);

}  // namespace palu::app

#endif  // PALU_APPS_RUN_OPTIONS_H_
