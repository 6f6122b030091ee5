// What ggml calls when it loads the plug-in: GGML_BACKEND_PATH, or ggml_backend_load().
#include <cstdlib>
#include <string>
#include <variant>

#include "ggml/abi.h"
#include "ggml/abi_threads.h"
#include "ggml/config.h"
#include "ggml/device.h"
#include "ggml/report.h"
#include "palu/palu.h"

namespace palu::ggml {

const KVCacheConfig& CacheConfig() {
  static const KVCacheConfig config = [] {
    const char* const text = std::getenv("PALU_CACHE");
    return KVCacheConfig::Parse(text != nullptr && *text != 0 ? text : "palu");
  }();
  return config;
}

namespace {

ggml_backend_reg* Load(const void* caller) {
  ProbeOptions options;
  options.caller = caller;
  const std::variant<Host, std::string> probed = ProbeHost(options);
  if (const auto* error = std::get_if<std::string>(&probed)) Refuse(*error);
  const Host& host = std::get<Host>(probed);
  try {
    const std::string text = std::string("palu ") + PALU_VERSION +
                             ", PALU_CACHE=" + CacheConfig().ToString() + ", kernel " +
                             KernelTarget() + ", ggml " + host.version + " of generation " +
                             GenerationName(host);
    Say(text + "; needs --device PALU (or LLAMA_ARG_DEVICE=PALU)");
    Tell("loaded", text);
  } catch (const std::exception& error) {
    Refuse(std::string("PALU_CACHE: ") + error.what());
  }
  const bool shares_threads = SharesThreads(host, reinterpret_cast<const void*>(&Load));
  if (!shares_threads) {
    Say("this ggml has threads of its own (it was built without libgomp): answers are computed on "
        "one thread, only prompts on all; a llama.cpp with OpenMP, compiled by gcc, is faster");
  }
  InstallSummarySignal();
  ggml_backend_reg* const registration = MakeRegistration(host, MakeDevice(host, shares_threads));
  if (registration == nullptr) Say("serves another ggml of this process already; not loaded again");
  return registration;
}

}  // namespace
}  // namespace palu::ggml

extern "C" {

__attribute__((visibility("default"))) ggml_backend_reg* ggml_backend_init(void) {
  return palu::ggml::Load(__builtin_return_address(0));
}

// Tells this plug-in from those of others, for `palu check-plugin`.
__attribute__((visibility("default"))) const char* palu_ggml_version(void) { return PALU_VERSION; }
}
