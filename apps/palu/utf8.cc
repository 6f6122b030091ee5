#include "utf8.h"

#include <cstdint>

namespace palu::app {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

enum class Kind { kWhole, kCut, kBroken };

struct Character {
  Kind kind;
  size_t length;  // bytes; of a broken one, those that U+FFFD stands for
};

// Length of a character by its first byte, and the range of its second byte, which excludes
// over-long forms, surrogates and everything beyond U+10FFFF. Length 0: no character starts so.
struct Lead {
  size_t length;
  uint8_t low, high;
};

Lead LeadOf(uint8_t byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte >= 0xC2 && byte <= 0xDF) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte >= 0xE1 && byte <= 0xEF) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte >= 0xF1 && byte <= 0xF3) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

// The character at the start of a text that is not empty.
Character First(std::string_view text) {
  const Lead lead = LeadOf(static_cast<uint8_t>(text[0]));
  if (lead.length == 0) return {Kind::kBroken, 1};
  for (size_t i = 1; i < lead.length; ++i) {
    if (i == text.size()) return {Kind::kCut, i};
    const auto byte = static_cast<uint8_t>(text[i]);
    const uint8_t low = i == 1 ? lead.low : 0x80, high = i == 1 ? lead.high : 0xBF;
    if (byte < low || byte > high) return {Kind::kBroken, i};
  }
  return {Kind::kWhole, lead.length};
}

}  // namespace

size_t FindInvalidUtf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const Character character = First(text.substr(at));
    if (character.kind != Kind::kWhole) return at;
    at += character.length;
  }
  return std::string_view::npos;
}

std::string Utf8Stream::Push(std::string_view bytes) {
  pending_ += bytes;
  std::string out;
  size_t at = 0;
  while (at < pending_.size()) {
    const std::string_view rest = std::string_view(pending_).substr(at);
    const Character character = First(rest);
    if (character.kind == Kind::kCut) break;
    out += character.kind == Kind::kWhole ? rest.substr(0, character.length) : kReplacement;
    at += character.length;
  }
  pending_.erase(0, at);
  return out;
}

std::string Utf8Stream::Finish() {
  const bool cut = !pending_.empty();
  pending_.clear();
  return cut ? std::string(kReplacement) : std::string();
}

}  // namespace palu::app
