#include "check/verdict.h"

#include <fmt/format.h>

namespace palu::app {
namespace {

std::string NameTheDevice(const LlamaOptions& o) {
  return o.is_bench ? "add -dev PALU (llama-bench does not read LLAMA_ARG_DEVICE)"
                    : "export LLAMA_ARG_DEVICE=PALU, or add --device PALU";
}

// "after 60 s", "when it was ready", "when it ended".
std::string When(const Observation& seen) {
  switch (seen.ending) {
    case Ending::kTime:
      return fmt::format("after {} s", seen.seconds);
    case Ending::kReady:
      return "when it was ready for requests";
    default:
      return "when it ended";
  }
}

std::string Failed(const Observation& seen, const char* before) {
  return fmt::format("{} failed by itself (exit code {}) before {}: mend that first", seen.program,
                     seen.exit_code, before);
}

std::string Used(const Observation& seen) {
  std::string bits;
  for (const std::string& text : seen.events.bits) bits += (bits.empty() ? "" : " and ") + text;
  const size_t caches = seen.events.bits.size();
  return fmt::format("{} layers{}, {} bits per element when full, kernel {} ({}, PALU_CACHE={})",
                     seen.events.Layers(), caches > 1 ? fmt::format(" in {} caches", caches) : "",
                     bits, seen.events.kernel, seen.events.version, seen.events.cache);
}

std::string OnlySomeLayers(const Observation& seen) {
  const std::string& given = seen.options.gpu_layers;
  return fmt::format(
      "only {} of {} layers have their cache in palu, the others keep llama.cpp's: {}",
      seen.events.Layers(), seen.model_layers,
      given.empty() ? "add -ngl all" : fmt::format("give -ngl all instead of -ngl {}", given));
}

std::string NeverAttended(const Observation& seen) {
  const std::string what = fmt::format(
      "{} layers have their cache in palu, but {} no attention had "
      "run on it",
      seen.events.Layers(), When(seen));
  if (!seen.options.warms_up) return what + ": check without --no-warmup";
  if (seen.ending == Ending::kTime) return what + ": give more time with --timeout";
  return what + ": the program did not warm up; check one that reads a prompt";
}

std::string LoadedWithoutCache(const Observation& seen) {
  const LlamaOptions& o = seen.options;
  const std::string what =
      fmt::format("the plug-in was loaded, but {} no cache was in it", When(seen));
  if (!o.is_llama) {
    return what + ": the program must give device PALU to llama.cpp, and all layers to the device";
  }
  if (!o.NamesPalu()) {
    return what +
           (o.device.empty() ? ", as no device was chosen: "
                             : fmt::format(", as the device is {}: ", o.device)) +
           NameTheDevice(o);
  }
  if (o.keeps_cache_on_host) return what + ", as -nkvo keeps it from devices: remove -nkvo";
  if (o.gpu_layers == "0") return what + ", as -ngl 0 keeps all layers from it: give -ngl all";
  if (seen.ending == Ending::kTime) {
    return what + ": the model may still be loading, give more time with --timeout";
  }
  return what + ": see its messages";
}

std::string NeverLoaded(const Observation& seen) {
  if (!seen.file_fault.empty()) return seen.file_fault;
  if (!seen.options.is_llama) {
    return fmt::format(
        "{} never loaded the plug-in: it is no llama.cpp program, or is one that reads "
        "GGML_BACKEND_PATH only when a device is chosen: {}",
        seen.program, NameTheDevice(seen.options));
  }
  if (!seen.options.NamesPalu()) {
    return fmt::format(
        "{} never loaded the plug-in, as it looks for it only when a device is "
        "chosen: {}",
        seen.program, NameTheDevice(seen.options));
  }
  return fmt::format(
      "{} never loaded the plug-in, although the file is good: it does not read "
      "GGML_BACKEND_PATH (llama.cpp before July 2025, or a program without plug-ins)",
      seen.program);
}

}  // namespace

Verdict Judge(const Observation& seen) {
  const PluginEvents& events = seen.events;
  const bool failed = seen.ending == Ending::kExited && seen.exit_code != 0;
  if (!events.refusal.empty()) return {false, "palu refused: " + events.refusal};
  if (events.used) {
    // Caches of a second model may be among them, never fewer than its own.
    if (events.Layers() < seen.model_layers) return {false, OnlySomeLayers(seen)};
    return {true, Used(seen)};
  }
  if (failed) {
    return {false, Failed(seen, events.loaded ? "attention ran" : "it loaded the plug-in")};
  }
  if (!events.reserved.empty()) return {false, NeverAttended(seen)};
  return {false, events.loaded ? LoadedWithoutCache(seen) : NeverLoaded(seen)};
}

}  // namespace palu::app
