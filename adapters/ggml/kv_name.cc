#include "ggml/kv_name.h"

#include <charconv>

namespace palu::ggml {
namespace {

constexpr std::string_view kPrefix = "cache_";

// The letter before "_l<digits>" at the end, and the digits; 0 if the name is another.
char Letter(std::string_view name, int& layer) {
  if (!name.starts_with(kPrefix)) return 0;
  const size_t l = name.rfind("_l");
  if (l == std::string_view::npos || l <= kPrefix.size()) return 0;
  const char* const end = name.data() + name.size();
  const auto [next, error] = std::from_chars(name.data() + l + 2, end, layer);
  return error == std::errc() && next == end && layer >= 0 ? name[l - 1] : 0;
}

}  // namespace

std::optional<KvName> ParseKvName(std::string_view name) {
  KvName found;
  const char letter = Letter(name, found.layer);
  if (letter != 'k' && letter != 'v') return std::nullopt;
  found.values = letter == 'v';
  return found;
}

bool IsRecurrentName(std::string_view name) {
  int layer = 0;
  const char letter = Letter(name, layer);
  return letter == 'r' || letter == 's';
}

}  // namespace palu::ggml
