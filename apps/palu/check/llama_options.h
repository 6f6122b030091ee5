// File: llama_options.h - what a command line and its environment tell llama.cpp about the KV
// cache.
#ifndef PALU_APPS_CHECK_LLAMA_OPTIONS_H_
#define PALU_APPS_CHECK_LLAMA_OPTIONS_H_

#include <string>
#include <vector>

namespace palu::app {

struct LlamaOptions {
  // Its name says that it is one of llama.cpp's own programs. Of others nothing below is certain:
  // a script may set what it likes.
  bool is_llama = false;
  bool is_bench = false;  // which does not read LLAMA_ARG_...
  std::string device;     // of --device or LLAMA_ARG_DEVICE; "" = not given
  std::string gpu_layers;
  bool keeps_cache_on_host = false;  // --no-kv-offload
  bool warms_up = true;
  std::string model;  // path of the last -m that was given; "" = none

  bool NamesPalu() const;
};

// `command`: program and arguments. The environment is that of this program. As in llama.cpp, an
// argument wins over the environment, and the last of two over the first.
LlamaOptions ReadLlamaOptions(const std::vector<std::string>& command);

}  // namespace palu::app

#endif  // PALU_APPS_CHECK_LLAMA_OPTIONS_H_
