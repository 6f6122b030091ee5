// File: text.h - small text helpers shared by parsing and messages.
#ifndef PALU_SRC_BASE_TEXT_H_
#define PALU_SRC_BASE_TEXT_H_

#include <charconv>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace palu {

inline std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

// The whole text as a number of type T, or nothing.
template <class T>
std::optional<T> ParseNumber(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Shortest form that reads back to the same number.
template <class T>
std::string NumberText(T value) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof(text), value);
  return std::string(text, end);
}

inline std::string Join(const std::vector<std::string>& parts, const char* separator) {
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i) out += (i ? separator : "") + parts[i];
  return out;
}

}  // namespace palu

#endif  // PALU_SRC_BASE_TEXT_H_
