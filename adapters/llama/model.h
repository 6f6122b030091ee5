// File: model.h - a GGUF model loaded through an installed libllama.
#ifndef PALU_ADAPTERS_LLAMA_MODEL_H_
#define PALU_ADAPTERS_LLAMA_MODEL_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "palu/builder.h"

struct llama_model;

namespace palu::llama {

using Token = int32_t;

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

struct ModelInfo {
  std::string path, name, architecture;
  int layers = 0, heads = 0;
  int64_t train_context = 0;  // positions the model was trained for
  int64_t parameters = 0, file_bytes = 0;
  int vocabulary = 0;
  bool adds_bos = false;
  bool has_chat_template = false;
};

struct ModelOptions {
  int64_t context =
      0;  // positions the run will reach; 0 = the training context. Chooses LongRoPE's long or
          // short factors, which llama.cpp ties to the size of its own cache.
};

// Weights, tokenizer and the shape that caches need. Sessions share one model.
// Threads: const calls are safe at once.
class Model {
 public:
  // Errors: FormatError (missing, truncated or foreign file; recurrent, hybrid, encoder or other
  // models whose attention cannot be taken over, with the reason).
  static std::shared_ptr<const Model> Load(const std::string& path,
                                           const ModelOptions& options = {});
  ~Model();

  const ModelInfo& info() const;
  // One LayerShape per layer: KV heads, head_dim, sliding window (found by a probe at load).
  const ModelShape& shape() const;

  // `special`: recognise control tokens written in the text. BOS is added when the model asks for
  // it and `bos`. Errors: InputError when text is not UTF-8 or the model has no tokenizer.
  std::vector<Token> Tokenize(std::string_view text, bool bos, bool special) const;
  // Bytes of one token; may be part of a UTF-8 character.
  std::string Piece(Token token, bool special = false) const;
  bool EndsGeneration(Token token) const;
  // The model's own template, or chatml where it has none. `reply`: end with the start of an
  // assistant turn. Errors: FormatError when llama.cpp does not know the model's template.
  std::string ApplyChatTemplate(std::span<const ChatMessage> messages, bool reply) const;

  llama_model* handle() const;

  // For the adapter's own files (model_impl.h).
  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  Model();
  std::unique_ptr<Impl> impl_;
};

}  // namespace palu::llama

#endif  // PALU_ADAPTERS_LLAMA_MODEL_H_
