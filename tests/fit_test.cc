// The fit: moments, un-rotation and averaging, axes, rank rule, bit plans.
#include <map>
#include <memory>

#include "base/memory.h"
#include "fit/basis.h"
#include "fit/bit_plan.h"
#include "fit/moments.h"
#include "fit/rotated_mean.h"
#include "kernels/kernels.h"
#include "methods/layer_codec.h"
#include "test_util.h"

namespace palu {
namespace {

using namespace test;

Moments MomentsOf(const Floats& x, int dim) {
  Moments m(dim);
  m.Add(x.data(), static_cast<int64_t>(x.size()) / dim, dim);
  return m;
}

// ---- moments ----

TEST(Moments, EqualPlainSums) {
  const int dim = 7, n = 50, stride = 9;
  const Floats x = Gaussian(n * stride, 1);
  Moments m(dim);
  m.Add(x.data(), 20, stride);
  m.Add(x.data() + 20 * stride, 30, stride);
  EXPECT_EQ(m.rows, n);
  double energy = 0;
  for (int i = 0; i < dim; ++i) {
    double sum = 0;
    for (int t = 0; t < n; ++t) sum += x[t * stride + i];
    EXPECT_NEAR(m.sum[i], sum, 1e-9);
    for (int j = 0; j < dim; ++j) {
      double product = 0;
      for (int t = 0; t < n; ++t)
        product += static_cast<double>(x[t * stride + i]) * x[t * stride + j];
      EXPECT_NEAR(m.second[i * dim + j], product, 1e-9);
      if (i == j) energy += product;
    }
  }
  EXPECT_NEAR(m.Energy(), energy, 1e-9);
}

TEST(Moments, KeepASmallVarianceBesideALargeMean) {
  // The Gram matrix is summed in double: a spread of 0.01 around 100 survives the subtraction.
  Floats x = Gaussian(4096, 2, 0.01);
  for (float& v : x) v += 100;
  const PrincipalAxes axes = FitPrincipalAxes(MomentsOf(x, 1));
  EXPECT_NEAR(axes.mean[0], 100, 1e-3);
  EXPECT_NEAR(std::sqrt(axes.variance[0]), 0.01, 5e-4);
}

class RopeMoments : public testing::TestWithParam<std::tuple<RopePairing, int, int>> {};

TEST_P(RopeMoments, UnrotateUndoesTheRotation) {
  const auto [pairing, dim, n_rot] = GetParam();
  const RopeParams rope = Rope(n_rot, 10000, pairing);
  const Dims dims{1, 1, 40, dim};
  const Floats x = Gaussian(dims.size(), 3);
  Floats turned = x;
  Rotate(rope, 1000, dims, &turned);
  EXPECT_GT(MaxAbs(turned, x), 0.5);
  Unrotate(rope, 1000, turned.data(), 40, dim);
  EXPECT_LT(MaxAbs(turned, x), 1e-5);
}

TEST_P(RopeMoments, AverageEqualsTheSumOverAllPositions) {
  const auto [pairing, dim, n_rot] = GetParam();
  const RopeParams rope = Rope(n_rot, 500, pairing);
  const int rows = 12, positions = 300;
  Floats x = Gaussian(rows * dim, 4);
  for (float& v : x) v += 0.5f;
  // Brute force: every row at every position.
  Moments all(dim);
  for (int p = 0; p < positions; ++p) {
    for (int r = 0; r < rows; ++r) {
      Floats row(&x[r * dim], &x[r * dim] + dim);
      Rotate(rope, p, {1, 1, 1, dim}, &row);
      all.Add(row.data(), 1, dim);
    }
  }
  const Moments averaged = AverageOverPositions(MomentsOf(x, dim), rope, positions);
  EXPECT_EQ(averaged.rows, rows);
  for (int i = 0; i < dim; ++i) {
    EXPECT_NEAR(averaged.sum[i], all.sum[i] / positions, 1e-4);
    for (int j = 0; j < dim; ++j) {
      EXPECT_NEAR(averaged.second[i * dim + j], all.second[i * dim + j] / positions, 1e-4);
    }
  }
}

// Odd tails that are not rotated included.
INSTANTIATE_TEST_SUITE_P(Shapes, RopeMoments,
                         testing::Combine(testing::Values(RopePairing::kHalves,
                                                          RopePairing::kInterleaved),
                                          testing::Values(16, 21), testing::Values(4, 16)));

TEST(RopeMomentsEdges, NoRotationAndOnePositionChangeNothing) {
  const Moments m = MomentsOf(Gaussian(20 * 8, 5), 8);
  for (const auto& [rope, positions] :
       {std::pair{RopeParams{}, int64_t{1000}}, std::pair{Rope(8), int64_t{1}}}) {
    const Moments averaged = AverageOverPositions(m, rope, positions);
    EXPECT_LT(MaxAbs(averaged.sum, m.sum), 1e-12);
    EXPECT_LT(MaxAbs(averaged.second, m.second), 1e-12);
  }
}

TEST(RopeMomentsEdges, AFullTurnIsIsotropic) {
  // One fast plane over very many positions: no mean, equal variances, no correlation.
  Floats x = Gaussian(100 * 2, 6);
  for (size_t i = 0; i < x.size(); i += 2) x[i] = 3 + 0.1f * x[i];
  const Moments averaged =
      AverageOverPositions(MomentsOf(x, 2), {RopePairing::kHalves, {1.0f}}, 1 << 20);
  EXPECT_NEAR(averaged.sum[0] / 100, 0, 1e-4);
  EXPECT_NEAR(averaged.second[0], averaged.second[3], 1e-2);
  EXPECT_NEAR(averaged.second[1], 0, 1e-2);
}

// Slow planes with one long axis: within a prompt they hardly turn, so the prompt's own moments see
// one direction of each and drop the other, which later keys point to.
TEST(RopeMomentsEdges, AveragedFitHoldsForLaterPositions) {
  const int dim = 64, prompt = 512;
  const RopeParams rope = Rope(dim, 10000);
  const Dims dims{1, 1, prompt, dim};
  Floats raw = Gaussian(dims.size(), 7);
  for (size_t i = 0; i < raw.size(); ++i) {
    const size_t d = i % dim, plane = d % 32;
    raw[i] *= plane < 20 ? 0.3f : d < 32 ? 3.0f : 0.1f;
  }
  Floats keys = raw, later = raw;
  Rotate(rope, 0, dims, &keys);
  Rotate(rope, 20000, dims, &later);
  const auto lost = [&](const Moments& fit) {
    const PrincipalAxes axes = FitPrincipalAxes(fit);
    double all = 0, kept = 0;
    for (int t = 0; t < prompt; ++t) {
      for (int c = 0; c < 32; ++c) {
        double latent = 0;
        for (int d = 0; d < dim; ++d)
          latent += axes.vectors[c * dim + d] * (later[t * dim + d] - axes.mean[d]);
        kept += latent * latent;
      }
      for (int d = 0; d < dim; ++d) all += std::pow(later[t * dim + d] - axes.mean[d], 2);
    }
    return 1 - kept / all;
  };
  Floats back = keys;
  Unrotate(rope, 0, back.data(), prompt, dim);
  EXPECT_LT(lost(AverageOverPositions(MomentsOf(back, dim), rope, 32768)),
            0.5 * lost(MomentsOf(keys, dim)));
}

// ---- axes and ranks ----

TEST(PrincipalAxesTest, FindPlantedAxesAndSpectrum) {
  const int n = 300, dim = 24;
  const std::vector<double> sigma = {50, 20, 9, 4, 1};
  const Floats x = WithSingularValues(n, dim, sigma, 8);
  const PrincipalAxes axes = FitPrincipalAxes(MomentsOf(x, dim));
  const std::vector<double> got = axes.Sigma(n);
  for (int i = 0; i < dim; ++i) {
    EXPECT_NEAR(got[i], i < 5 ? sigma[i] : 0, 1e-3);
    // Orthonormal rows whose largest entry is positive.
    for (int j = 0; j < dim; ++j) {
      double dot = 0;
      for (int d = 0; d < dim; ++d) dot += axes.vectors[i * dim + d] * axes.vectors[j * dim + d];
      EXPECT_NEAR(dot, i == j, 1e-9);
    }
    const auto begin = axes.vectors.begin() + i * dim;
    const auto top = std::max_element(begin, begin + dim,
                                      [](double a, double b) { return std::abs(a) < std::abs(b); });
    EXPECT_GT(*top, 0);
  }
  const std::vector<double> planted = Orthonormal(5, dim, 8);
  for (int i = 0; i < 5; ++i) {
    double dot = 0;
    for (int d = 0; d < dim; ++d) dot += axes.vectors[i * dim + d] * planted[i * dim + d];
    EXPECT_NEAR(std::abs(dot), 1, 1e-5);
  }
}

TEST(PrincipalAxesTest, ConstantAndZeroRows) {
  for (const float value : {0.0f, 3.0f}) {
    const PrincipalAxes axes = FitPrincipalAxes(MomentsOf(Floats(50 * 8, value), 8));
    for (int i = 0; i < 8; ++i) {
      EXPECT_NEAR(axes.mean[i], value, 1e-9);
      EXPECT_GE(axes.variance[i], 0);
      EXPECT_LT(axes.variance[i], 1e-9);
      for (int d = 0; d < 8; ++d) EXPECT_TRUE(std::isfinite(axes.vectors[i * 8 + d]));
    }
  }
}

TEST(RankRule, WorkedExamples) {
  const std::vector<double> sigma = {4, 3, 2, 1};
  EXPECT_EQ(EnergyRank(sigma, 0.4, EnergyRule::kSum), 1);
  EXPECT_EQ(EnergyRank(sigma, 0.41, EnergyRule::kSum), 2);
  EXPECT_EQ(EnergyRank(sigma, 0.9, EnergyRule::kSum), 3);
  EXPECT_EQ(EnergyRank(sigma, 1.0, EnergyRule::kSum), 4);
  EXPECT_EQ(EnergyRank(sigma, 0.9, EnergyRule::kSquares), 3);  // 16 + 9 + 4 of 30
  EXPECT_EQ(EnergyRank(sigma, 0.8, EnergyRule::kSquares), 2);
  EXPECT_EQ(EnergyRank({0, 0, 0}, 0.9, EnergyRule::kSum), 1);
  EXPECT_EQ(EnergyRank({1e-13, 1e-14}, 1.0, EnergyRule::kSum), 1);
  EXPECT_EQ(EnergyRank({5}, 0.1, EnergyRule::kSum), 1);
}

TEST(RankRule, Policies) {
  EXPECT_EQ(AgreeOnRanks({5, 3, 9}, RankPolicy::kMin), (std::vector<int>{3, 3, 3}));
  EXPECT_EQ(AgreeOnRanks({5, 3, 9}, RankPolicy::kMax), (std::vector<int>{9, 9, 9}));
  EXPECT_EQ(AgreeOnRanks({5, 3, 9}, RankPolicy::kPerGroup), (std::vector<int>{5, 3, 9}));
}

TEST(HeadGroupsTest, FirstGroupsTakeOneMore) {
  const auto sizes = [](int heads, int groups) {
    std::vector<int> out;
    int next = 0;
    for (const HeadRange& range : HeadGroups(heads, groups)) {
      EXPECT_EQ(range.first, next);
      next = range.last;
      out.push_back(range.last - range.first);
    }
    EXPECT_EQ(next, heads);
    return out;
  };
  EXPECT_EQ(sizes(8, 4), (std::vector<int>{2, 2, 2, 2}));
  EXPECT_EQ(sizes(7, 3), (std::vector<int>{3, 2, 2}));
  EXPECT_EQ(sizes(2, 8), (std::vector<int>{1, 1}));
  EXPECT_EQ(sizes(4, 0), (std::vector<int>{4}));
}

// ---- the public spectrum ----

TEST(SpectrumTest, BlocksOfAnyDtypeAndPositionAddUp) {
  const Dims dims{1, 5, 200, 32};
  const RopeParams rope = Rope(32);
  const Floats keys = RoundedTo(RopedKeys(dims, rope, 9, 2), DType::kF16);
  MomentSum once(5, 32, 2), blocks(5, 32, 2);
  once.Add(Whole(keys, dims), 0, &rope);
  for (int64_t at = 0; at < 200; at += 70) {
    const int64_t n = std::min<int64_t>(70, 200 - at);
    const Floats part = CopySlice(keys, dims, at, n);
    const OwnedTensor half = ToTensor(part, {1, 5, n, 32}, DType::kF16);
    blocks.Add(half.view(), at, &rope);
  }
  const std::vector<Spectrum> a = once.Spectra(4096, &rope), b = blocks.Spectra(4096, &rope);
  ASSERT_EQ(a.size(), 2u);
  for (int g = 0; g < 2; ++g) {
    EXPECT_EQ(a[g].rows, 200 * (g == 0 ? 3 : 2));
    EXPECT_LT(RelL2(b[g].sigma, a[g].sigma), 1e-6);
    EXPECT_NEAR(b[g].mean_energy, a[g].mean_energy, 1e-6);
    EXPECT_TRUE(std::is_sorted(a[g].sigma.rbegin(), a[g].sigma.rend()));
    EXPECT_GE(a[g].RankFor(0.9, EnergyRule::kSum), a[g].RankFor(0.9, EnergyRule::kSquares));
  }
}

TEST(SpectrumTest, MeanEnergyIsTheShareOfTheMean) {
  Floats x(100 * 4);
  const Floats noise = Gaussian(x.size(), 10);
  for (size_t i = 0; i < x.size(); ++i) x[i] = 3 + noise[i];
  MomentSum sum(1, 4, 1);
  sum.Add(ConstTensor::Dense(x.data(), DType::kF32, {1, 1, 100, 4}));
  EXPECT_NEAR(sum.Spectra()[0].mean_energy, 0.9, 0.02);
}

TEST(SpectrumTest, RefusesWrongInput) {
  const Floats x(64);
  MomentSum sum(2, 16, 1);
  const auto add = [&](std::array<int64_t, 4> shape) {
    return MessageOf<InputError>(
        [&] { sum.Add(ConstTensor::Dense(x.data(), DType::kF32, shape)); });
  };
  ExpectSays(add({1, 2, 4, 8}), {"8", "16"});
  ExpectSays(add({1, 1, 4, 16}), {"1", "2"});
  ExpectSays(add({1, 2, 0, 16}), {"0"});
  ExpectSays(MessageOf<InputError>([] { MomentSum(0, 16, 1); }), {"heads", "0"});
  ExpectSays(MessageOf<InputError>([] { MomentSum(2, 4096, 1); }), {"4096", "1024"});
}

// ---- waves ----

TEST(WavesTest, ScoresAreTheDotProductsWithTheTurnedMean) {
  constexpr int kDim = 64, kPlanes = kDim / 2;
  for (const float base : {100.0f, 10000.0f, 1e6f}) {
    for (const RopePairing pairing : {RopePairing::kHalves, RopePairing::kInterleaved}) {
      RopeParams rope;
      rope.pairing = pairing;
      for (int i = 0; i < kPlanes; ++i) {
        rope.inv_freq.push_back(std::pow(base, -static_cast<float>(i) / kPlanes));
      }
      const Floats mean = Gaussian(kDim, 31), q = Gaussian(kDim, 32);
      const RotatedMean rotated(rope, mean);
      Floats waves(2 * kPlanes), turned(2 * kPlanes);
      const float rest = rotated.Coefficients(q.data(), waves.data());
      EXPECT_EQ(rest, 0.0f);
      Waves tables;
      tables.Prepare(rotated.inv_freq());
      for (const int64_t position : {int64_t{4}, int64_t{1028}, int64_t{131076}, int64_t{4}}) {
        const float* const phase = tables.Phases(position);
        for (int i = 0; i < kPlanes; ++i) {
          const float c = phase[i], s = phase[kPlanes + i];
          turned[i] = waves[i] * c + waves[kPlanes + i] * s;
          turned[kPlanes + i] = waves[kPlanes + i] * c - waves[i] * s;
        }
        constexpr int kTokens = kWaveBlocks * kWaveBlock;
        Floats scores(kTokens, 0.0f), keys(static_cast<size_t>(kTokens) * kDim, 0.0f);
        Active().wave_scores({&tables.plan(), turned.data(), 1, kWaveBlocks, scores.data(), 0});
        rotated.Add(position, kTokens, 1.0f, keys.data(), kDim);
        double worst = 0, largest = 0;
        for (int t = 0; t < kTokens; ++t) {
          double dot = 0;
          for (int d = 0; d < kDim; ++d) dot += static_cast<double>(q[d]) * keys[t * kDim + d];
          worst = std::max(worst, std::fabs(dot - scores[t]));
          largest = std::max(largest, std::fabs(dot));
        }
        EXPECT_LT(worst, 2e-5 * largest) << base << " at " << position;
      }
    }
  }
}

// ---- bit plans ----

TEST(MixedBitsTest, LeadingChannelsGetMore) {
  EXPECT_EQ(MixedBits(8, 0.25, 4, 2), (std::vector<uint8_t>{4, 4, 2, 2, 2, 2, 2, 2}));
  EXPECT_EQ(MixedBits(3, 0.25, 4, 2), (std::vector<uint8_t>{4, 2, 2}));  // at least one
  EXPECT_EQ(MixedBits(3, 0.0, 8, 1), (std::vector<uint8_t>{8, 1, 1}));
  EXPECT_EQ(MixedBits(1, 0.9, 5, 3), (std::vector<uint8_t>{5}));
  EXPECT_EQ(MixedBits(3, 1.0, 5, 3), (std::vector<uint8_t>{5, 5, 5}));
}

double PlanBits(const std::vector<ChannelGroup>& groups,
                const std::vector<std::vector<uint8_t>>& bits, double scale_bits) {
  double used = 0, elements = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    // Pages hold channels by fours.
    for (size_t c = 0; c < bits[g].size(); c += 4) {
      const int b = *std::max_element(
          bits[g].begin() + static_cast<int64_t>(c),
          bits[g].begin() + static_cast<int64_t>(std::min(c + 4, bits[g].size())));
      used += 4 * groups[g].heads * (b == 0 ? 0 : b + scale_bits);
    }
    elements += static_cast<double>(groups[g].heads) * groups[g].head_dim;
  }
  return used / elements;
}

double PlanError(const std::vector<ChannelGroup>& groups,
                 const std::vector<std::vector<uint8_t>>& bits, ScaleFormat scales,
                 int group_size) {
  double error = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t c = 0; c < bits[g].size(); ++c) {
      error += groups[g].heads * groups[g].variance[c] * Distortion(scales, group_size, bits[g][c]);
    }
  }
  return error;
}

std::vector<double> Squares(std::vector<double> x) {
  for (double& v : x) v *= v;
  return x;
}

TEST(WaterFillTest, MeetsItsBudgetAndDescends) {
  for (const ScaleFormat scales : {ScaleFormat::kMinMax, ScaleFormat::kLog8}) {
    for (const int group_size : {8, 32, 128}) {
      for (const double budget : {1.0, 2.0, 2.5, 3.0, 4.5, 7.9}) {
        const std::vector<ChannelGroup> groups = {{Squares(Decay(64, 3, 0.95)), 2, 64},
                                                  {Squares(Decay(64, 1, 0.9)), 1, 64},
                                                  {Squares(Decay(40, 2, 0.99)), 3, 64}};
        const auto bits = WaterFill(groups, scales, group_size, budget);
        const double used = PlanBits(groups, bits, ScaleBits(scales, group_size));
        // A group that gets nothing keeps four channels of 2 bits, beyond the budget.
        const bool forced = bits[1][0] == 2 && std::count(bits[1].begin(), bits[1].end(), 0) == 60;
        EXPECT_LE(used, budget + (forced ? 4 * (2 + ScaleBits(scales, group_size)) / (6 * 64) : 0) +
                            1e-9);
        // Everything is spent but less than one step, unless all channels have all bits.
        bool full = true;
        for (const auto& group : bits) {
          for (const uint8_t b : group) full &= b == 8;
        }
        if (!full) {
          EXPECT_GT(used, budget - 4 * 3 * (3 + ScaleBits(scales, group_size)) / (6 * 64));
        }
        for (size_t g = 0; g < groups.size(); ++g) {
          EXPECT_EQ(bits[g].size(), groups[g].variance.size());
          for (size_t c = 0; c < bits[g].size(); ++c) EXPECT_EQ(bits[g][c], bits[g][c / 4 * 4]);
          // The last crumbs may go to a cheaper step further down, once per group at most.
          int rises = 0;
          for (size_t c = 1; c < bits[g].size(); ++c) rises += bits[g][c] > bits[g][c - 1];
          EXPECT_LE(rises, 1);
        }
      }
    }
  }
}

// All assignments of 0 to 8 bits to a few quads of channels.
double BestError(const std::vector<ChannelGroup>& groups, ScaleFormat scales, int group_size,
                 double budget) {
  static constexpr uint8_t kBits[] = {0, 1, 2, 3, 4, 5, 6, 7, 8};
  size_t n = 0;
  for (const ChannelGroup& g : groups) n += g.variance.size() / 4;
  int64_t combinations = 1;
  for (size_t i = 0; i < n; ++i) combinations *= 9;
  double best = INFINITY;
  for (int64_t code = 0; code < combinations; ++code) {
    int64_t rest = code;
    std::vector<std::vector<uint8_t>> bits(groups.size());
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t c = 0; c < groups[g].variance.size(); c += 4, rest /= 9)
        bits[g].insert(bits[g].end(), 4, kBits[rest % 9]);
    }
    if (PlanBits(groups, bits, ScaleBits(scales, group_size)) > budget + 1e-9) continue;
    best = std::min(best, PlanError(groups, bits, scales, group_size));
  }
  return best;
}

// Bits per element that the best choice of every quad takes at a price per bit; 0 when that drops a
// whole group, which the library never does.
double BitsAtPrice(const std::vector<ChannelGroup>& groups, ScaleFormat scales, int group_size,
                   double price) {
  std::vector<std::vector<uint8_t>> bits(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t c = 0; c < groups[g].variance.size(); c += 4) {
      const double* const quad = &groups[g].variance[c];
      const double variance = (quad[0] + quad[1] + quad[2] + quad[3]) / 4;
      uint8_t best = 0;
      double least = variance;
      for (const uint8_t b : {1, 2, 3, 4, 5, 6, 7, 8}) {
        const double value = variance * Distortion(scales, group_size, b) +
                             price * (b + ScaleBits(scales, group_size));
        if (value < least) best = b, least = value;
      }
      bits[g].insert(bits[g].end(), 4, best);
    }
    if (bits[g][0] == 0) return 0;
  }
  return PlanBits(groups, bits, ScaleBits(scales, group_size));
}

TEST(WaterFillTest, IsOptimalOnSmallCases) {
  Random random(11);
  for (int round = 0; round < 10; ++round) {
    std::vector<ChannelGroup> groups = {{{}, 1, 12}, {{}, 2, 12}};
    for (ChannelGroup& g : groups) {
      for (int c = 0; c < 12; ++c) g.variance.push_back(std::exp(2 * random.Normal()));
      std::sort(g.variance.rbegin(), g.variance.rend());
    }
    const ScaleFormat scales = round % 2 ? ScaleFormat::kMinMax : ScaleFormat::kLog8;
    // At a budget that some price spends exactly, the plan is the best of all 9^6.
    const double exact = BitsAtPrice(groups, scales, 32, std::exp(-4 * random.Uniform()));
    if (exact > 0) {
      EXPECT_NEAR(PlanError(groups, WaterFill(groups, scales, 32, exact), scales, 32),
                  BestError(groups, scales, 32, exact), 1e-9);
    }
    // At any budget it is at least as good as the best plan of one step less: 0 -> 2 bits and the
    // scales, for the two heads of the larger group.
    const double budget = 1.5 + 4 * random.Uniform(), step = 2 * (2 + ScaleBits(scales, 32)) / 9;
    EXPECT_LE(PlanError(groups, WaterFill(groups, scales, 32, budget), scales, 32),
              BestError(groups, scales, 32, budget - step) + 1e-9);
  }
}

TEST(WaterFillTest, OrderOfTheChannelsDoesNotMatter) {
  std::vector<double> variance = Squares(Decay(10, 3, 0.7));
  const auto sorted = WaterFill({{variance, 1, 10}}, ScaleFormat::kLog8, 32, 3.0)[0];
  std::swap(variance[0], variance[9]);
  std::swap(variance[3], variance[6]);
  const auto mixed = WaterFill({{variance, 1, 10}}, ScaleFormat::kLog8, 32, 3.0)[0];
  EXPECT_EQ(mixed[9], sorted[0]);
  EXPECT_EQ(mixed[0], sorted[9]);
  EXPECT_EQ(mixed[6], sorted[3]);
  EXPECT_EQ(mixed[5], sorted[5]);
}

TEST(WaterFillTest, UnequalBitsBeatEqualOnes) {
  const std::vector<ChannelGroup> groups = {{Squares(Decay(64, 3, 0.93)), 2, 64}};
  const auto bits = WaterFill(groups, ScaleFormat::kLog8, 32, 3.25);
  const std::vector<std::vector<uint8_t>> equal = {std::vector<uint8_t>(64, 3)};
  EXPECT_LT(PlanError(groups, bits, ScaleFormat::kLog8, 32),
            0.5 * PlanError(groups, equal, ScaleFormat::kLog8, 32));
}

TEST(WaterFillTest, NeverUsesOneBitWithMinMaxScales) {
  // It loses more than the channel has.
  const auto bits = WaterFill({{Squares(Decay(64, 3, 0.9)), 1, 64}}, ScaleFormat::kMinMax, 32, 2.0);
  EXPECT_EQ(std::count(bits[0].begin(), bits[0].end(), 1), 0);
}

TEST(WaterFillTest, EveryGroupKeepsAChannel) {
  const auto bits =
      WaterFill({{std::vector<double>(8, 1.0), 1, 8}, {std::vector<double>(8, 0.0), 1, 8}},
                ScaleFormat::kLog8, 32, 2.0);
  EXPECT_GT(bits[1][0], 0);
}

// ---- one layer ----

TEST(FitLayerTest, RanksAndBasesOfEachGroup) {
  // Two groups of unlike rank: the policies differ.
  const Floats low = WithSingularValues(512, 32, Decay(4, 100, 0.99), 12);
  const Floats high = WithSingularValues(512, 32, Decay(16, 100, 0.99), 13);
  LayerMoments moments;
  moments.units = HeadGroups(4, 4);
  moments.groups = HeadGroups(4, 2);
  moments.k = {MomentsOf(low, 32), MomentsOf(high, 32)};
  moments.v = {MomentsOf(high, 32), MomentsOf(low, 32)};
  const auto account = std::make_shared<MemoryAccount>(0);
  const std::map<std::string, std::pair<int, int>> want = {
      {"min", {4, 4}}, {"max", {16, 16}}, {"per_group", {4, 16}}};
  for (const auto& [policy, ranks] : want) {
    const auto codec =
        FitLayer(KVCacheConfig::Parse("palu:bits=mixed,energy_threshold=0.99,energy_rule=squares,"
                                      "rank_policy=" +
                                      policy),
                 FindMethod("palu"), 32, 32, {4, 4}, moments, account);
    EXPECT_EQ(codec->k.groups[0].rank(), ranks.first) << policy;
    EXPECT_EQ(codec->k.groups[1].rank(), ranks.second) << policy;
    EXPECT_EQ(codec->v.groups[0].rank(), ranks.second) << policy;
    for (const GroupCodec& g : codec->k.groups)
      EXPECT_EQ(g.basis.size(), static_cast<size_t>(g.rank()) * 32);
    EXPECT_EQ(codec->k.group_of_unit, (std::vector<int>{0, 0, 1, 1}));
    EXPECT_EQ(account->allocated(), codec->basis_bytes());
  }
  EXPECT_EQ(account->allocated(), 0);
}

}  // namespace
}  // namespace palu
