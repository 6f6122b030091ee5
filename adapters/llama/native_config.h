// File: native_config.h - the text form of llama.cpp's own caches: llama:TYPE[/TYPE_V][,fa=on|off].
#ifndef PALU_ADAPTERS_LLAMA_NATIVE_CONFIG_H_
#define PALU_ADAPTERS_LLAMA_NATIVE_CONFIG_H_

#include <llama.h>

#include <string>
#include <string_view>

namespace palu::llama {

struct NativeConfig {
  ggml_type type_k = GGML_TYPE_F16, type_v = GGML_TYPE_F16;
  llama_flash_attn_type flash =
      LLAMA_FLASH_ATTN_TYPE_AUTO;  // llama.cpp's default: on where the CPU can

  bool flash_off() const { return flash == LLAMA_FLASH_ATTN_TYPE_DISABLED; }
  // With what is resolved: "llama:f16,fa=on".
  std::string ToString() const;
};

// `text` starts with "llama:". Errors: ConfigError.
NativeConfig ParseNativeConfig(std::string_view text);

}  // namespace palu::llama

#endif  // PALU_ADAPTERS_LLAMA_NATIVE_CONFIG_H_
