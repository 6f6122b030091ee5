#include "codec/page_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "palu/errors.h"

namespace palu {
namespace {

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
      return static_cast<uint32_t>(plan.groups() * plan.slots) * 4;
    case ScaleFormat::kLog8:
      return static_cast<uint32_t>(plan.groups() * plan.slots);
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

namespace {

// Sorts the channels by bits and cuts them into quads.
void MakeQuads(PagePlan& plan) {
  std::vector<int16_t> order(plan.bits.size());
  std::iota(order.begin(), order.end(), int16_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](int16_t a, int16_t b) { return plan.bits[a] > plan.bits[b]; });
  plan.slot.resize(plan.bits.size());
  for (size_t i = 0; i < order.size();) {
    const int bits = plan.bits[order[i]], first = plan.slots / kQuad;
    for (; i < order.size() && plan.bits[order[i]] == bits; ++i) {
      plan.slot[order[i]] = static_cast<int16_t>(plan.channel.size());
      plan.channel.push_back(order[i]);
    }
    while (plan.channel.size() % kQuad != 0) plan.channel.push_back(-1);
    plan.slots = static_cast<int>(plan.channel.size());
    const int count = plan.slots / kQuad - first;
    plan.runs.push_back({bits, first, count, plan.block_bytes});
    plan.block_bytes += static_cast<uint32_t>(count * 16 * bits);
  }
  plan.in_order = plan.slots == plan.rank;
  for (int c = 0; c < plan.rank; ++c) plan.in_order = plan.in_order && plan.slot[c] == c;
}

void MakeConstants(PagePlan& plan) {
  const size_t n = static_cast<size_t>(plan.slots) + kChannelPadding;
  plan.unit.assign(n, 0.0f);
  plan.half.assign(n, 0.0f);
  plan.mid.assign(n, 0.0f);
  int64_t levels = 0;
  for (int s = 0; s < plan.slots; ++s) {
    if (plan.channel[s] < 0) continue;
    const int bits = plan.bits[plan.channel[s]];
    const bool log8 = plan.scales == ScaleFormat::kLog8, lloyd_max = log8 && bits <= 4;
    plan.unit[s] = log8 ? Log8Unit(bits) : 1.0f;
    plan.half[s] = log8 ? Log8Half(bits) : 0.5f;
    const int mid = lloyd_max ? -LloydMaxLevels(bits)[0] : 1 << (bits - 1);
    plan.mid[s] = static_cast<float>(mid);
    levels += lloyd_max ? 2 * mid : (1 << bits) - 1;
  }
  if (levels > 0) {
    plan.most_query = static_cast<int>(std::min<int64_t>(32767, 0x7fffffff / levels));
  }
}

}  // namespace

const QuadRun& PagePlan::run_of(int slot) const {
  size_t r = 0;
  while (slot / kQuad >= runs[r].first + runs[r].count) ++r;
  return runs[r];
}

uint32_t PagePlan::quad_offset(int quad) const {
  const QuadRun& run = run_of(quad * kQuad);
  return run.offset + static_cast<uint32_t>((quad - run.first) * 16 * run.bits);
}

PagePlan PagePlan::Make(std::vector<uint8_t> bits, ScaleFormat scales, int group_size,
                        int page_tokens, CodeOrder order) {
  CheckBits(bits);
  CheckGroupSize(group_size);

  PagePlan plan;
  plan.rank = static_cast<int>(bits.size());
  plan.raw = !bits.empty() && bits[0] > 8;
  plan.scales = scales;
  plan.order = order;
  plan.page_tokens = page_tokens > 0 ? page_tokens
                     : plan.raw      ? kBlockTokens
                                     : std::max(kBlockTokens, group_size);
  plan.group_size = plan.raw ? kBlockTokens : plan.token_scaled() ? plan.page_tokens : group_size;
  plan.bits = std::move(bits);
  if (plan.raw) {
    plan.block_bytes = plan.raw_offset(plan.rank);
    return plan;
  }
  MakeQuads(plan);
  MakeConstants(plan);
  plan.scale_bytes = ScaleBytes(plan);
  return plan;
}

}  // namespace palu
