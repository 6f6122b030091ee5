// File: context.h - a llama_context and its batch, for one sequence.
#ifndef PALU_ADAPTERS_LLAMA_CONTEXT_H_
#define PALU_ADAPTERS_LLAMA_CONTEXT_H_

#include <llama.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "llama/session.h"

namespace palu::llama {

struct ContextOptions {
  int64_t cells = 256;  // of llama.cpp's own cache; it rounds up to 256
  int ubatch = 512;     // tokens per Decode at most
  int threads = 1;
  int sequences = 1;  // that may share the cells; Decode uses the first
  ggml_type type_k = GGML_TYPE_F16, type_v = GGML_TYPE_F16;
  llama_flash_attn_type flash = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  bool full_windows = true;  // sliding-window layers get as many cells as the others
  ggml_backend_sched_eval_callback callback = nullptr;
  void* callback_data = nullptr;
};

class Context {
 public:
  // Errors: MemoryError, FormatError.
  Context(llama_model* model, const ContextOptions& options);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // One llama_decode. Returns its code: 0 = done, 1 = the cache is full, else failed.
  // tokens: 1..ubatch of them, the first at `position`. No allocation of our own.
  int Decode(std::span<const Token> tokens, int64_t position, LogitRows rows);
  // Forgets the tokens; the cells stay allocated.
  void Clear();

  llama_context* get() const { return context_.get(); }
  llama_memory_t memory() const { return llama_get_memory(context_.get()); }

 private:
  std::unique_ptr<llama_context, decltype(&llama_free)> context_;
  std::vector<llama_token> tokens_;
  std::vector<llama_pos> positions_;
  std::vector<int32_t> n_seq_;
  std::vector<llama_seq_id*> seq_;
  std::vector<int8_t> wants_logits_;
  llama_seq_id seq_zero_ = 0;
};

// Cores to use for `threads` (0 = all).
int ResolveThreads(int threads);
// The same for attention on our cache: one where SharesThreads() is false.
int AttentionThreads(int threads);

}  // namespace palu::llama

#endif  // PALU_ADAPTERS_LLAMA_CONTEXT_H_
