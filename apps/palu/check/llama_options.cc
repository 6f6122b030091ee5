#include "check/llama_options.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <string_view>

namespace palu::app {
namespace {

std::string FromEnvironment(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

bool IsOff(const std::string& value) {
  return value == "0" || value == "off" || value == "false" || value == "disabled";
}

class Arguments {
 public:
  explicit Arguments(const std::vector<std::string>& words) : words_(words) {}

  // Where the last of these options stands; 0 = nowhere.
  size_t Last(std::initializer_list<std::string_view> names) const {
    for (size_t i = words_.size(); i-- > 1;) {
      if (std::find(names.begin(), names.end(), words_[i]) != names.end()) return i;
    }
    return 0;
  }
  // The word after it, or `otherwise`.
  std::string Value(std::initializer_list<std::string_view> names, std::string otherwise) const {
    const size_t at = Last(names);
    return at > 0 && at + 1 < words_.size() ? words_[at + 1] : std::move(otherwise);
  }

 private:
  const std::vector<std::string>& words_;
};

}  // namespace

bool LlamaOptions::NamesPalu() const {
  return ("," + device + ",").find(",PALU,") != std::string::npos;
}

LlamaOptions ReadLlamaOptions(const std::vector<std::string>& command) {
  const Arguments given(command);
  const std::string name = std::filesystem::path(command.at(0)).filename().string();
  LlamaOptions o;
  o.is_llama = name.starts_with("llama-");
  o.is_bench = name.starts_with("llama-bench");
  const auto environment = [&o](const char* variable) {
    return o.is_bench ? std::string() : FromEnvironment(variable);
  };
  o.device = given.Value({"-dev", "--device"}, environment("LLAMA_ARG_DEVICE"));
  o.gpu_layers = given.Value({"-ngl", "--gpu-layers", "--n-gpu-layers"},
                             environment("LLAMA_ARG_N_GPU_LAYERS"));
  o.model = given.Value({"-m", "--model"}, environment("LLAMA_ARG_MODEL"));
  o.warms_up = given.Last({"--no-warmup"}) <= given.Last({"--warmup"});
  const size_t off = given.Last({"-nkvo", "--no-kv-offload"}),
               on = given.Last({"-kvo", "--kv-offload"});
  o.keeps_cache_on_host = off != on ? off > on
                                    : IsOff(environment("LLAMA_ARG_KV_OFFLOAD")) ||
                                          !environment("LLAMA_ARG_NO_KV_OFFLOAD").empty();
  // llama-bench: --no-kv-offload takes a value, and has another short form.
  if (o.is_bench) o.keeps_cache_on_host = given.Value({"-nkvo", "--no-kv-offload"}, "0") == "1";
  return o;
}

}  // namespace palu::app
