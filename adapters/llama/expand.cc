#include "llama/expand.h"

#include <ggml.h>
#include <gguf.h>
#include <llama.h>

#include <memory>

#include "llama/context.h"
#include "llama/gguf_file.h"
#include "llama/log.h"
#include "palu/errors.h"

namespace palu::llama {

int64_t FloatFileBytes(const std::string& path) {
  CheckGgufFile(path);
  ggml_context* tensors = nullptr;
  const std::unique_ptr<gguf_context, decltype(&gguf_free)> gguf(
      gguf_init_from_file(path.c_str(), {.no_alloc = true, .ctx = &tensors}), gguf_free);
  const std::unique_ptr<ggml_context, decltype(&ggml_free)> owner(tensors, ggml_free);
  if (!gguf) throw FormatError(path + " has a damaged or truncated GGUF header");
  auto bytes = static_cast<int64_t>(gguf_get_data_offset(gguf.get()));
  const auto alignment = static_cast<int64_t>(gguf_get_alignment(gguf.get()));
  for (ggml_tensor* t = ggml_get_first_tensor(tensors); t != nullptr;
       t = ggml_get_next_tensor(tensors, t)) {
    bytes += ggml_nelements(t) * static_cast<int64_t>(sizeof(float)) + alignment;
  }
  return bytes;
}

void ExpandToFloat(const std::string& from, const std::string& to, int threads) {
  SilenceLog();
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = LLAMA_FTYPE_ALL_F32;
  params.allow_requantize = true;
  params.nthread = ResolveThreads(threads);
  const ErrorLog log;
  if (llama_model_quantize(from.c_str(), to.c_str(), &params) != 0) {
    throw FormatError("llama.cpp cannot expand the weights of " + from + " into " + to +
                      log.suffix());
  }
}

}  // namespace palu::llama
