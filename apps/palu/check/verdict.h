// File: verdict.h - whether a program used palu for its KV cache, from what was seen of it.
#ifndef PALU_APPS_CHECK_VERDICT_H_
#define PALU_APPS_CHECK_VERDICT_H_

#include <cstdint>
#include <string>

#include "check/llama_options.h"
#include "check/plugin_events.h"

namespace palu::app {

enum class Ending {
  kUsed,    // stopped as soon as attention had run
  kReady,   // a server that waits for requests, and has not run attention
  kTime,    // neither within the time
  kExited,  // by itself
};

struct Observation {
  std::string program;  // as it was called
  LlamaOptions options;
  std::string file_fault;  // of PluginFileFault
  PluginEvents events;
  Ending ending = Ending::kTime;
  int exit_code = 0;         // of kExited
  int seconds = 0;           // of kTime
  int64_t model_layers = 0;  // that have a KV cache; 0 = not known
};

struct Verdict {
  bool yes = false;
  std::string text;  // one line; a no says what to do
};

Verdict Judge(const Observation& seen);

}  // namespace palu::app

#endif  // PALU_APPS_CHECK_VERDICT_H_
