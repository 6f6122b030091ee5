#include "llama/context.h"

#include <algorithm>
#include <string>
#include <thread>

#include "llama/log.h"
#include "palu/errors.h"

namespace palu::llama {
namespace {

llama_context* MakeContext(llama_model* model, const ContextOptions& options) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<uint32_t>(std::max<int64_t>(options.cells, options.ubatch));
  params.n_batch = params.n_ubatch = static_cast<uint32_t>(options.ubatch);
  params.n_seq_max = static_cast<uint32_t>(options.sequences);
  params.n_threads = params.n_threads_batch = options.threads;
  params.type_k = options.type_k;
  params.type_v = options.type_v;
  params.flash_attn_type = options.flash;
  params.kv_unified = true;
  params.swa_full = options.full_windows;
  params.offload_kqv = false;  // K, V and Q must be in host memory
  params.op_offload = false;
  params.no_perf = true;
  params.cb_eval = options.callback;
  params.cb_eval_user_data = options.callback_data;

  const ErrorLog log;
  llama_context* context = llama_init_from_model(model, params);
  if (context != nullptr) return context;
  const std::string text = log.text();
  const std::string message = "llama.cpp cannot make a context of " + std::to_string(params.n_ctx) +
                              " cells (" + ggml_type_name(options.type_k) + ", " +
                              ggml_type_name(options.type_v) + ")" + log.suffix();
  if (text.find("alloc") != std::string::npos) throw MemoryError(message);
  throw FormatError(message);
}

}  // namespace

Context::Context(llama_model* model, const ContextOptions& options)
    : context_(MakeContext(model, options), llama_free),
      tokens_(options.ubatch),
      positions_(options.ubatch),
      n_seq_(options.ubatch, 1),
      seq_(options.ubatch, &seq_zero_),
      wants_logits_(options.ubatch) {
  if (llama_get_memory(context_.get()) == nullptr) {
    throw FormatError("the model keeps no KV cache");
  }
}

int Context::Decode(std::span<const Token> tokens, int64_t position, LogitRows rows) {
  const int n = static_cast<int>(tokens.size());
  for (int i = 0; i < n; ++i) {
    tokens_[i] = tokens[i];
    positions_[i] = static_cast<llama_pos>(position + i);
    wants_logits_[i] = rows == LogitRows::kAll || (rows == LogitRows::kLast && i == n - 1);
  }
  return llama_decode(context_.get(), {.n_tokens = n,
                                       .token = tokens_.data(),
                                       .embd = nullptr,
                                       .pos = positions_.data(),
                                       .n_seq_id = n_seq_.data(),
                                       .seq_id = seq_.data(),
                                       .logits = wants_logits_.data()});
}

void Context::Clear() { llama_memory_clear(memory(), /*data=*/false); }

int ResolveThreads(int threads) {
  if (threads > 0) return threads;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int AttentionThreads(int threads) { return SharesThreads() ? ResolveThreads(threads) : 1; }

}  // namespace palu::llama
