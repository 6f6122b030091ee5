#include "fit/bit_plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string>

#include "palu/errors.h"

namespace palu {
namespace {

constexpr std::array<int, 9> kBitChoices = {0, 1, 2, 3, 4, 5, 6, 7, 8};

// Simulated with the codecs of page_plan.h on 2^20 (min/max) and 2^23 (log8) Gaussians whose size
// is spread evenly between two powers of two; oracle_test re-measures them. Rows: token groups of
// 8, 16, 32, 64, 128; columns: 1..8 bits.
constexpr double kMinMaxDistortion[5][8] = {
    {0.6853, 0.06174, 0.01123, 0.002442, 0.0005715, 0.0001387, 3.408e-05, 8.459e-06},
    {1.271, 0.1069, 0.01946, 0.004229, 0.0009894, 0.0002401, 5.902e-05, 1.464e-05},
    {1.963, 0.1543, 0.02815, 0.006119, 0.001434, 0.0003469, 8.539e-05, 2.118e-05},
    {2.741, 0.2029, 0.03711, 0.008054, 0.001886, 0.0004561, 0.0001125, 2.789e-05},
    {3.578, 0.2511, 0.04589, 0.009984, 0.002338, 0.0005657, 0.0001392, 3.455e-05},
};
constexpr double kLog8Distortion[5][8] = {
    {0.3188, 0.0767, 0.01573, 0.003781, 0.001025, 0.0002573, 6.434e-05, 1.611e-05},
    {0.3411, 0.09462, 0.02123, 0.005055, 0.00147, 0.0003696, 9.269e-05, 2.323e-05},
    {0.3524, 0.1055, 0.02602, 0.006206, 0.001912, 0.0004838, 0.0001218, 3.057e-05},
    {0.3581, 0.1115, 0.02964, 0.007194, 0.002323, 0.000594, 0.0001502, 3.775e-05},
    {0.3609, 0.1146, 0.03216, 0.008009, 0.002689, 0.0006983, 0.0001772, 4.472e-05},
};

int GroupRow(int group_size) {
  int row = 0;
  while (row < 4 && (8 << row) < group_size) ++row;
  return row;
}

// What one more step of bits brings, for the Lagrangian and the final fill.
struct Costs {
  std::array<double, kBitChoices.size()> distortion, bits;
};

Costs MakeCosts(ScaleFormat scales, int group_size) {
  Costs costs;
  for (size_t i = 0; i < kBitChoices.size(); ++i) {
    const int b = kBitChoices[i];
    costs.distortion[i] = Distortion(scales, group_size, b);
    costs.bits[i] = b == 0 ? 0.0 : b + ScaleBits(scales, group_size);
  }
  return costs;
}

// argmin over choices of variance * distortion + price * bits; the smaller number of bits wins a
// tie.
int BestChoice(const Costs& costs, double variance, double price, int least) {
  int best = least;
  double best_value = variance * costs.distortion[least] + price * costs.bits[least];
  for (int i = least + 1; i < static_cast<int>(kBitChoices.size()); ++i) {
    const double value = variance * costs.distortion[i] + price * costs.bits[i];
    if (value < best_value) best = i, best_value = value;
  }
  return best;
}

using Choices = std::vector<std::vector<int>>;

// Choices at a price, and the bits they use.
double Allocate(const std::vector<ChannelGroup>& groups, const Costs& costs, double price,
                Choices& out) {
  double used = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    out[g].resize(groups[g].variance.size());
    for (size_t c = 0; c < out[g].size(); ++c) {
      out[g][c] = BestChoice(costs, groups[g].variance[c], price, groups[g].may_drop ? 0 : 1);
      used += groups[g].heads * costs.bits[out[g][c]];
    }
  }
  return used;
}

// Spends what the price left over: again and again the upgrade with the largest gain per bit that
// still fits.
void SpendRest(const std::vector<ChannelGroup>& groups, const Costs& costs, double rest,
               Choices& choices) {
  while (true) {
    double best_gain = 0;
    int best_group = -1, best_channel = -1, best_choice = 0;
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t c = 0; c < choices[g].size(); ++c) {
        for (int next = choices[g][c] + 1; next < static_cast<int>(kBitChoices.size()); ++next) {
          const double bits = costs.bits[next] - costs.bits[choices[g][c]];
          const double gain = groups[g].variance[c] *
                              (costs.distortion[choices[g][c]] - costs.distortion[next]) / bits;
          if (bits * groups[g].heads <= rest && gain > best_gain) {
            best_gain = gain;
            best_group = static_cast<int>(g), best_channel = static_cast<int>(c),
            best_choice = next;
          }
        }
      }
    }
    if (best_group < 0) return;
    int& choice = choices[best_group][best_channel];
    rest -= (costs.bits[best_choice] - costs.bits[choice]) * groups[best_group].heads;
    choice = best_choice;
  }
}

}  // namespace

double Distortion(ScaleFormat scales, int group_size, int bits) {
  if (bits == 0) return 1.0;
  const auto& table = scales == ScaleFormat::kMinMax ? kMinMaxDistortion : kLog8Distortion;
  return table[GroupRow(group_size)][bits - 1];
}

double ScaleBits(ScaleFormat scales, int group_size) {
  return (scales == ScaleFormat::kMinMax ? 32.0 : 8.0) / group_size;
}

std::vector<uint8_t> MixedBits(int rank, double hi_fraction, int hi_bit, int lo_bit) {
  const int n_hi = std::min(rank, std::max(1, static_cast<int>(std::floor(rank * hi_fraction))));
  std::vector<uint8_t> bits(rank, static_cast<uint8_t>(lo_bit));
  std::fill_n(bits.begin(), n_hi, static_cast<uint8_t>(hi_bit));
  return bits;
}

std::vector<uint8_t> ScheduleBits(int rank, bool explicit_rank) {
  constexpr int kRuns = 8;
  const int schedule[kRuns] = {8, 4, 2, 1, 1, 0, 0, 0};
  const int least = 4 * kRuns;
  if (rank < least && explicit_rank) {
    throw ConfigError("rank=" + std::to_string(rank) + " is too small for the schedule of " +
                      std::to_string(kRuns) + " runs; allowed are " + std::to_string(least) +
                      " or more, or rank=none");
  }
  std::vector<uint8_t> bits;
  const int runs = std::min(kRuns, rank);
  for (int run = 0; run < runs; ++run) {
    const int length = rank / runs + (run < rank % runs ? 1 : 0);
    const int b = schedule[run] == 0 && rank < least ? 1 : schedule[run];
    bits.insert(bits.end(), static_cast<size_t>(length), static_cast<uint8_t>(b));
  }
  return bits;
}

namespace {

// Quads of channels, in order of their variance: what a page gives bits to.
struct Quads {
  ChannelGroup group;          // one "channel" per quad, with the mean variance of its slots
  std::vector<size_t> sorted;  // channels; quad i has sorted[4 i .. 4 i + 3]
};

Quads MakeQuads(const ChannelGroup& channels) {
  Quads quads{channels, std::vector<size_t>(channels.variance.size())};
  std::iota(quads.sorted.begin(), quads.sorted.end(), size_t{0});
  std::stable_sort(quads.sorted.begin(), quads.sorted.end(),
                   [&](size_t a, size_t b) { return channels.variance[a] > channels.variance[b]; });
  quads.group.heads = channels.heads * kChannelsPerStep;
  quads.group.variance.assign((quads.sorted.size() + kChannelsPerStep - 1) / kChannelsPerStep, 0.0);
  for (size_t i = 0; i < quads.sorted.size(); ++i) {
    quads.group.variance[i / kChannelsPerStep] +=
        channels.variance[quads.sorted[i]] / kChannelsPerStep;
  }
  return quads;
}

}  // namespace

std::vector<std::vector<uint8_t>> WaterFill(const std::vector<ChannelGroup>& groups,
                                            ScaleFormat scales, int group_size, double budget) {
  const Costs costs = MakeCosts(scales, group_size);
  std::vector<Quads> all;
  std::vector<ChannelGroup> quads;
  double elements = 0, largest = 0;
  for (const ChannelGroup& group : groups) {
    // Of slots: heads whose channels do not fill the last quad pay for the rest of it.
    const int slots = (group.head_dim + kChannelsPerStep - 1) / kChannelsPerStep * kChannelsPerStep;
    elements += static_cast<double>(group.heads) * slots;
    for (const double v : group.variance) largest = std::max(largest, v);
    all.push_back(MakeQuads(group));
    quads.push_back(all.back().group);
  }
  const double allowed = budget * elements + 1e-9;
  Choices choices(groups.size());
  // Bisection on the logarithm of the price of one bit: a high price drops every quad, a low one
  // fills them all.
  double low = std::log(largest + 1e-300) - 60, high = std::log(largest + 1e-300) + 2;
  if (Allocate(quads, costs, std::exp(low), choices) > allowed) {
    for (int step = 0; step < 60; ++step) {
      const double middle = (low + high) / 2;
      (Allocate(quads, costs, std::exp(middle), choices) > allowed ? low : high) = middle;
    }
    const double used = Allocate(quads, costs, std::exp(high), choices);
    SpendRest(quads, costs, allowed - used, choices);
  }
  std::vector<std::vector<uint8_t>> bits(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    const bool any = std::any_of(choices[g].begin(), choices[g].end(), [](int c) { return c > 0; });
    if (!any && !choices[g].empty()) choices[g][0] = 2;
    bits[g].resize(groups[g].variance.size());
    for (size_t i = 0; i < bits[g].size(); ++i) {
      bits[g][all[g].sorted[i]] =
          static_cast<uint8_t>(kBitChoices[choices[g][i / kChannelsPerStep]]);
    }
  }
  return bits;
}

}  // namespace palu
