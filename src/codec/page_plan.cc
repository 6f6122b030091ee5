#include "codec/page_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <utility>

#include "palu/errors.h"

namespace palu {
namespace {

using Levels = std::array<int8_t, 16>;

// Levels of the Lloyd-Max quantiser of a unit Gaussian (J. Max, "Quantizing for minimum
// distortion", 1960), as integers times kUnit. Of all integer roundings with the largest level
// in 40..127, these have the least distortion: .36338, .11748, .03455 and .00951 at 1..4 bits,
// which is the exact quantiser's to 0.06 %.
constexpr Levels kLloydMax[5] = {
    {},
    {-64, 64},
    {-40, -12, 12, 40},
    {-88, -55, -31, -10, 10, 31, 55, 88},
    {-104, -79, -62, -48, -36, -25, -15, -5, 5, 15, 25, 36, 48, 62, 79, 104},
};

constexpr Levels kUniform[5] = {
    {},
    {-1, 0},
    {-2, -1, 0, 1},
    {-4, -3, -2, -1, 0, 1, 2, 3},
    {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
};

// 1..4 bits: the size of a Lloyd-Max level of 1; 5..8 bits: the uniform step of least distortion
// for a unit Gaussian
// (.00350, .00104, .000304 and .0000877). Both by numerical minimisation.
constexpr float kUnit[9] = {0,           0.012466942f, 0.037758745f, 0.024446139f, 0.026217138f,
                            0.18813879f, 0.10406301f,  0.056867658f, 0.030762399f};

void CheckBits(const std::vector<uint8_t>& bits) {
  if (bits.size() > static_cast<size_t>(kMaxRank)) {
    throw ConfigError("a page side has " + std::to_string(bits.size()) + " channels; at most " +
                      std::to_string(kMaxRank) + " are allowed");
  }
  for (const uint8_t b : bits) {
    const bool raw = b == 16 || b == 32;
    if (!raw && (b < 1 || b > 8)) {
      throw ConfigError("a channel has " + std::to_string(b) + " bits; 1..8, 16 or 32 are allowed");
    }
    if ((raw || bits[0] > 8) && b != bits[0]) {
      throw ConfigError("channels of " + std::to_string(bits[0]) + " and " + std::to_string(b) +
                        " bits in one page side; 16 and 32 bits do not mix with others");
    }
  }
}

void CheckGroupSize(int group_size) {
  for (const int allowed : {8, 16, 32, 64, 128}) {
    if (group_size == allowed) return;
  }
  throw ConfigError("group_size is " + std::to_string(group_size) +
                    "; 8, 16, 32, 64 and 128 are allowed");
}

uint32_t ScaleBytes(const PagePlan& plan) {
  switch (plan.scales) {
    case ScaleFormat::kMinMax:
      return static_cast<uint32_t>(plan.groups() * plan.rank) * 4;
    case ScaleFormat::kLog8:
      return static_cast<uint32_t>(plan.groups() * plan.rank);
    case ScaleFormat::kTokenMinMax:
      return static_cast<uint32_t>(plan.page_tokens * plan.channel_runs()) * 4;
    case ScaleFormat::kTokenAbsMax:
      return static_cast<uint32_t>(plan.page_tokens * plan.channel_runs()) * 2;
    case ScaleFormat::kTokenFactors:
      return static_cast<uint32_t>(plan.page_tokens) * 8;
  }
  return 0;
}

}  // namespace

const Levels& LloydMaxLevels(int bits) { return kLloydMax[bits]; }

const Levels& UniformLevels(int bits) { return kUniform[bits]; }

float Log8Unit(int bits) { return kUnit[bits]; }

float Log8Half(int bits) { return bits <= 4 ? 0.0f : 0.5f; }

float Log8Value(uint8_t e) {
  // The exponent and mantissa bits of e are those of a float; only the exponent's bias differs.
  return std::bit_cast<float>((static_cast<uint32_t>(e) + (127 - kLog8Bias) * 8) << 20);
}

uint8_t Log8FromFloat(float x) {
  const float lowest = Log8Value(0), highest = Log8Value(255);
  if (!(x > lowest)) return 0;
  if (x >= highest) return 255;
  // The scale at or below x, then up if x is past the geometric mean of it and the next.
  const uint32_t below = (std::bit_cast<uint32_t>(x) >> 20) - (127 - kLog8Bias) * 8;
  if (below == 255) return 255;
  const double low = Log8Value(static_cast<uint8_t>(below));
  const double high = Log8Value(static_cast<uint8_t>(below + 1));
  const double square = static_cast<double>(x) * x;
  return static_cast<uint8_t>(square > low * high ? below + 1 : below);
}

PagePlan PagePlan::Make(std::vector<uint8_t> bits, ScaleFormat scales, int group_size,
                        int page_tokens) {
  CheckBits(bits);
  CheckGroupSize(group_size);

  PagePlan plan;
  plan.rank = static_cast<int>(bits.size());
  plan.raw = !bits.empty() && bits[0] > 8;
  plan.scales = scales;
  plan.page_tokens = page_tokens > 0 ? page_tokens
                     : plan.raw      ? kBlockTokens
                                     : std::max(kBlockTokens, group_size);
  plan.group_size = plan.raw ? kBlockTokens : plan.token_scaled() ? plan.page_tokens : group_size;
  plan.code_offset.reserve(bits.size());
  for (const uint8_t b : bits) {
    plan.code_offset.push_back(plan.block_bytes);
    plan.block_bytes += 4u * b;
  }
  if (!plan.raw) {
    plan.scale_bytes = ScaleBytes(plan);
    plan.unit.assign(bits.size() + kChannelPadding, 0.0f);
    plan.half.assign(bits.size() + kChannelPadding, 0.0f);
    for (size_t c = 0; c < bits.size(); ++c) {
      plan.unit[c] = scales == ScaleFormat::kLog8 ? Log8Unit(bits[c]) : 1.0f;
      plan.half[c] = scales == ScaleFormat::kLog8 ? Log8Half(bits[c]) : 0.5f;
    }
  }
  plan.bits = std::move(bits);
  return plan;
}

}  // namespace palu
