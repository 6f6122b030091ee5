#include "sizes.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>

#include "palu/errors.h"

namespace palu::app {
namespace {

constexpr std::string_view kUnits = "KMGT";

// The power of 1024 that a suffix stands for; -1 when it is not one.
int UnitPower(std::string suffix) {
  std::transform(suffix.begin(), suffix.end(), suffix.begin(),
                 [](unsigned char c) { return std::toupper(c); });
  if (suffix.empty() || suffix == "B") return 0;
  const size_t unit = kUnits.find(suffix[0]);
  if (unit == std::string_view::npos) return -1;
  const std::string rest = suffix.substr(1);
  return rest.empty() || rest == "B" || rest == "IB" ? static_cast<int>(unit) + 1 : -1;
}

}  // namespace

int64_t ParseSize(std::string_view text) {
  double number = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  const int power =
      error == std::errc() ? UnitPower(std::string(end, text.data() + text.size())) : -1;
  const double bytes = power < 0 ? -1 : std::ldexp(number, 10 * power);
  // 2^60 keeps every later sum far from overflow. The comparison also refuses NaN.
  if (!(bytes >= 0 && bytes <= std::ldexp(1.0, 60))) {
    throw ConfigError(fmt::format(
        "size \"{}\" is not a number of bytes, optionally with K, M, G or T (such as 200M or 1.5G)",
        text));
  }
  return std::llround(bytes);
}

std::string FormatBytes(int64_t bytes) {
  if (std::abs(bytes) < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  // 1023.95 would print as 1024.0.
  for (value /= 1024; std::abs(value) >= 1023.95 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return fmt::format("{:.1f} {}iB", value, kUnits[unit]);
}

}  // namespace palu::app
