#include "llama/native_config.h"

#include <array>

#include "palu/errors.h"

namespace palu::llama {
namespace {

constexpr std::string_view kPrefix = "llama:";

// The types llama.cpp's own programs accept for a cache.
constexpr std::array kTypes = {GGML_TYPE_F32,    GGML_TYPE_F16,  GGML_TYPE_BF16,
                               GGML_TYPE_Q8_0,   GGML_TYPE_Q4_0, GGML_TYPE_Q4_1,
                               GGML_TYPE_IQ4_NL, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1};

ggml_type ParseType(std::string_view name) {
  std::string allowed;
  for (const ggml_type type : kTypes) {
    if (name == ggml_type_name(type)) return type;
    allowed += (allowed.empty() ? "" : ", ") + std::string(ggml_type_name(type));
  }
  throw ConfigError("llama.cpp's cache has no type '" + std::string(name) +
                    "'; allowed: " + allowed);
}

}  // namespace

std::string NativeConfig::ToString() const {
  std::string types = ggml_type_name(type_k);
  if (type_v != type_k) types += std::string("/") + ggml_type_name(type_v);
  return std::string(kPrefix) + types + (flash_off() ? ",fa=off" : ",fa=on");
}

NativeConfig ParseNativeConfig(std::string_view text) {
  std::string_view rest = text.substr(kPrefix.size());
  const size_t comma = rest.find(',');
  NativeConfig config;
  const std::string_view types = rest.substr(0, comma);
  const size_t slash = types.find('/');
  config.type_k = ParseType(types.substr(0, slash));
  config.type_v =
      slash == std::string_view::npos ? config.type_k : ParseType(types.substr(slash + 1));
  if (comma != std::string_view::npos) {
    const std::string_view option = rest.substr(comma + 1);
    if (option != "fa=on" && option != "fa=off") {
      throw ConfigError("'" + std::string(option) + "' in cache '" + std::string(text) +
                        "'; allowed: fa=on, fa=off");
    }
    config.flash =
        option == "fa=on" ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  }
  if (config.flash_off() && ggml_is_quantized(config.type_v)) {
    throw ConfigError("cache '" + std::string(text) +
                      "': llama.cpp keeps quantized values only with fa=on");
  }
  return config;
}

}  // namespace palu::llama
