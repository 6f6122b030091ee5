// File: gguf_file.h - checks of a GGUF file before llama.cpp sees it.
//
// llama.cpp reports a bad file only in its log; here the path and the reason go into the error.
#ifndef PALU_ADAPTERS_LLAMA_GGUF_FILE_H_
#define PALU_ADAPTERS_LLAMA_GGUF_FILE_H_

#include <cstdint>
#include <string>

namespace palu::llama {

struct GgufFacts {
  std::string architecture;
  int64_t file_bytes = 0;
  int64_t cached_layers = 0;  // that have a KV cache of their own; 0 = the file does not say
  // LongRoPE: two sets of frequency factors, of which llama.cpp takes the long one when its cache
  // has more cells than `original_context`.
  bool long_rope = false;
  int64_t original_context = 0;
};

// Errors: FormatError (missing, not a file, not GGUF, damaged header, shorter than its tensors
// need).
GgufFacts CheckGgufFile(const std::string& path);

}  // namespace palu::llama

#endif  // PALU_ADAPTERS_LLAMA_GGUF_FILE_H_
