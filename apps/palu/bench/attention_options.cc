#include "bench/attention_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "bench/attention_cache.h"
#include "palu/errors.h"

namespace palu::app {
namespace {

constexpr int kMaxHeads = 1024;
constexpr int kMaxHeadDim = 1024;  // of a cache

// The three numbers, or false.
bool ReadNumbers(std::string_view text, std::array<int, 3>& numbers) {
  const char *at = text.data(), *end = at + text.size();
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (i > 0 && (at == end || *at++ != 'x')) return false;
    const auto [next, error] = std::from_chars(at, end, numbers[i]);
    if (error != std::errc()) return false;
    at = next;
  }
  return at == end;
}

}  // namespace

std::string AttentionShape::Name() const {
  return fmt::format("{}x{}x{}", query_heads, kv_heads, head_dim);
}

AttentionShape ParseShape(std::string_view text) {
  std::array<int, 3> numbers{};
  if (!ReadNumbers(text, numbers)) {
    throw ConfigError(fmt::format(
        "shape \"{}\" is not HxKxD: query heads, KV heads, head size (such as 32x8x128)", text));
  }
  const auto [heads, kv_heads, head_dim] = numbers;
  if (heads < 1 || heads > kMaxHeads || kv_heads < 1 || heads % kv_heads != 0) {
    throw ConfigError(fmt::format(
        "shape \"{}\": {} query heads for {} KV heads; allowed: 1..{} and a multiple of the KV "
        "heads",
        text, heads, kv_heads, kMaxHeads));
  }
  if (head_dim < 2 || head_dim > kMaxHeadDim || head_dim % 2 != 0) {
    throw ConfigError(fmt::format("shape \"{}\": head size {}; allowed: even, 2..{}", text,
                                  head_dim, kMaxHeadDim));
  }
  return {heads, kv_heads, head_dim};
}

void CheckAttentionOptions(AttentionOptions& options) {
  std::vector<std::string>& caches = options.caches;
  if (std::find(caches.begin(), caches.end(), kBaseCache) == caches.end()) {
    caches.insert(caches.begin(), kBaseCache);
  }
  for (const AttentionShape& shape : options.shapes) {
    for (const std::string& cache : caches) {
      EstimateAttentionBytes(cache, shape, 256, 1);  // throws when they do not go together
    }
  }
}

}  // namespace palu::app
