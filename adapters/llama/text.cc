// Model's tokenizer and chat template.
#include <algorithm>
#include <limits>

#include "llama/log.h"
#include "llama/model.h"
#include "llama/model_impl.h"
#include "palu/errors.h"

namespace palu::llama {
namespace {

// Bytes of the UTF-8 character that starts at text[i], 0 when there is none (Unicode 15, table
// 3-7).
size_t CharacterBytes(std::string_view text, size_t i) {
  const auto byte = [&](size_t k) { return static_cast<unsigned char>(text[i + k]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const size_t n = first >= 0xC2 && first <= 0xDF   ? 2
                   : (first & 0xF0) == 0xE0         ? 3
                   : first >= 0xF0 && first <= 0xF4 ? 4
                                                    : 0;
  if (n == 0 || i + n > text.size()) return 0;
  for (size_t k = 1; k < n; ++k) {
    if ((byte(k) & 0xC0) != 0x80) return 0;
  }
  // Overlong forms, surrogates, beyond U+10FFFF.
  if ((first == 0xE0 && byte(1) < 0xA0) || (first == 0xED && byte(1) > 0x9F) ||
      (first == 0xF0 && byte(1) < 0x90) || (first == 0xF4 && byte(1) > 0x8F)) {
    return 0;
  }
  return n;
}

void CheckUtf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const size_t n = CharacterBytes(text, i);
    if (n == 0) throw InputError("the text is not UTF-8 at byte " + std::to_string(i));
    i += n;
  }
}

}  // namespace

std::vector<Token> Model::Tokenize(std::string_view text, bool bos, bool special) const {
  if (!impl_->has_tokenizer()) throw InputError(impl_->info.path + " has no tokenizer");
  CheckUtf8(text);
  if (text.size() > std::numeric_limits<int32_t>::max() / 2) {
    throw InputError("the text has " + std::to_string(text.size()) +
                     " bytes; at most 1 GiB is allowed");
  }
  const auto bytes = static_cast<int32_t>(text.size());
  // add_special = false: it would add EOS as well where the model asks for that.
  std::vector<Token> tokens(text.size() / 2 + 16);
  int n = llama_tokenize(impl_->vocab, text.data(), bytes, tokens.data(),
                         static_cast<int32_t>(tokens.size()), false, special);
  if (n < 0) {
    tokens.resize(-static_cast<int64_t>(n));
    n = llama_tokenize(impl_->vocab, text.data(), bytes, tokens.data(),
                       static_cast<int32_t>(tokens.size()), false, special);
  }
  tokens.resize(std::max(n, 0));
  const Token first = llama_vocab_bos(impl_->vocab);
  if (bos && impl_->info.adds_bos && first != LLAMA_TOKEN_NULL &&
      (tokens.empty() || tokens.front() != first)) {
    tokens.insert(tokens.begin(), first);
  }
  return tokens;
}

std::string Model::Piece(Token token, bool special) const {
  if (token < 0 || token >= impl_->info.vocabulary) {
    throw InputError("token " + std::to_string(token) + " is outside the vocabulary 0.." +
                     std::to_string(impl_->info.vocabulary - 1));
  }
  if (!impl_->has_tokenizer()) return "";
  std::string piece(32, '\0');
  int n = llama_token_to_piece(impl_->vocab, token, piece.data(),
                               static_cast<int32_t>(piece.size()), 0, special);
  if (n < 0) {
    piece.resize(-n);
    n = llama_token_to_piece(impl_->vocab, token, piece.data(), static_cast<int32_t>(piece.size()),
                             0, special);
  }
  piece.resize(std::max(n, 0));
  return piece;
}

bool Model::EndsGeneration(Token token) const { return llama_vocab_is_eog(impl_->vocab, token); }

std::string Model::ApplyChatTemplate(std::span<const ChatMessage> messages, bool reply) const {
  std::vector<llama_chat_message> chat;
  size_t bytes = 256;
  for (const ChatMessage& message : messages) {
    chat.push_back({message.role.c_str(), message.content.c_str()});
    bytes += 2 * (message.role.size() + message.content.size());
  }
  const char* own = llama_model_chat_template(impl_->model.get(), nullptr);
  const char* name = own ? own : "chatml";
  std::string text(bytes, '\0');
  int n = llama_chat_apply_template(name, chat.data(), chat.size(), reply, text.data(),
                                    static_cast<int32_t>(text.size()));
  if (n > static_cast<int>(text.size())) {
    text.resize(n);
    n = llama_chat_apply_template(name, chat.data(), chat.size(), reply, text.data(), n);
  }
  if (n < 0) throw FormatError("llama.cpp does not know the chat template of " + impl_->info.path);
  text.resize(n);
  return text;
}

}  // namespace palu::llama
