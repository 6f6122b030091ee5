#include "text_model.h"

#include <ggml.h>
#include <gguf.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <vector>

#include "random_model.h"

namespace palu::app {
namespace {

// Values of llama.cpp's token types in GGUF files.
enum TokenType : int32_t { kNormal = 1, kUnknown = 2, kControl = 3, kByte = 6 };

struct Vocabulary {
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  std::vector<float> scores;

  void Add(const std::string& token, TokenType type) {
    tokens.push_back(token);
    types.push_back(type);
    scores.push_back(0);
  }
};

Vocabulary Bytes(int size) {
  Vocabulary vocabulary;
  vocabulary.Add("<unk>", kUnknown);
  vocabulary.Add("<s>", kControl);
  vocabulary.Add("</s>", kControl);
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", byte);
    vocabulary.Add(name, kByte);
  }
  vocabulary.Add("\xE2\x96\x81", kNormal);  // what this kind of tokenizer turns a space into
  // Private-use characters: no text has them, so every byte of a text stays a token of its own.
  while (static_cast<int>(vocabulary.tokens.size()) < size) {
    const auto n = static_cast<int>(vocabulary.tokens.size());
    vocabulary.Add({'\xEE', static_cast<char>(0x80 + n / 64), static_cast<char>(0x80 + n % 64)},
                   kNormal);
  }
  return vocabulary;
}

void SetTokenizer(gguf_context* gguf, const Vocabulary& vocabulary, bool chat, bool bos) {
  std::vector<const char*> tokens;
  for (const std::string& token : vocabulary.tokens) tokens.push_back(token.c_str());
  const size_t n = tokens.size();
  gguf_set_val_str(gguf, "tokenizer.ggml.model", "llama");
  gguf_set_arr_str(gguf, "tokenizer.ggml.tokens", tokens.data(), n);
  gguf_set_arr_data(gguf, "tokenizer.ggml.scores", GGUF_TYPE_FLOAT32, vocabulary.scores.data(), n);
  gguf_set_arr_data(gguf, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, vocabulary.types.data(), n);
  gguf_set_val_u32(gguf, "tokenizer.ggml.unknown_token_id", 0);
  gguf_set_val_u32(gguf, "tokenizer.ggml.bos_token_id", 1);
  gguf_set_val_u32(gguf, "tokenizer.ggml.eos_token_id", 2);
  gguf_set_val_bool(gguf, "tokenizer.ggml.add_bos_token", bos);
  gguf_set_val_bool(gguf, "tokenizer.ggml.add_space_prefix", false);
  // llama.cpp knows chatml by this marker.
  if (chat) gguf_set_val_str(gguf, "tokenizer.chat_template", "<|im_start|>");
}

}  // namespace

void WriteTextModel(const std::string& path, bool chat, bool bos, const std::string& architecture) {
  const llama::RandomModel model = llama::MakeRandomModel(architecture);
  llama::WriteRandomModel(model, path);
  ggml_context* loaded = nullptr;
  const std::unique_ptr<gguf_context, decltype(&gguf_free)> old(
      gguf_init_from_file(path.c_str(), {.no_alloc = false, .ctx = &loaded}), gguf_free);
  const std::unique_ptr<ggml_context, decltype(&ggml_free)> tensors(loaded, ggml_free);
  if (old == nullptr) throw std::runtime_error("cannot read " + path);
  const std::unique_ptr<gguf_context, decltype(&gguf_free)> gguf(gguf_init_empty(), gguf_free);
  gguf_set_kv(gguf.get(), old.get());
  SetTokenizer(gguf.get(), Bytes(model.vocabulary), chat, bos);
  for (ggml_tensor* t = ggml_get_first_tensor(loaded); t != nullptr;
       t = ggml_get_next_tensor(loaded, t)) {
    if (gguf_find_tensor(old.get(), ggml_get_name(t)) >= 0) gguf_add_tensor(gguf.get(), t);
  }
  if (!gguf_write_to_file(gguf.get(), path.c_str(), /*only_meta=*/false)) {
    throw std::runtime_error("cannot write " + path);
  }
}

}  // namespace palu::app
