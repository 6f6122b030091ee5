// The page format: sizes, the bytes themselves, the scales, and what coding costs in error.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/fp16.h"
#include "codec/page_plan.h"
#include "kernels/kernels.h"
#include "palu/errors.h"

namespace palu {
namespace {

std::vector<uint8_t> Bytes(const PagePlan& plan) {
  return std::vector<uint8_t>(plan.page_bytes() + kReadPadding, 0xcd);
}

std::vector<uint8_t> Encode(const KernelTable& kernels, const PagePlan& plan,
                            const std::vector<float>& x) {
  std::vector<uint8_t> page = Bytes(plan);
  kernels.encode_page(plan, x.data(), plan.page_tokens, page.data());
  return page;
}

// [channel][token] of a whole page.
std::vector<float> Decode(const KernelTable& kernels, const PagePlan& plan,
                          const std::vector<uint8_t>& page) {
  std::vector<float> out(static_cast<size_t>(plan.rank) * plan.page_tokens);
  std::vector<float> block(static_cast<size_t>(plan.rank) * kBlockTokens);
  for (int b = 0; b < plan.blocks(); ++b) {
    kernels.decode_block(plan, page.data(), b, block.data());
    for (int c = 0; c < plan.rank; ++c) {
      for (int t = 0; t < kBlockTokens; ++t) {
        out[c * plan.page_tokens + b * kBlockTokens + t] = block[c * kBlockTokens + t];
      }
    }
  }
  return out;
}

std::vector<float> Gaussian(size_t n, float sigma, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> x(n);
  for (float& v : x) v = normal(random);
  return x;
}

// Of unit variance; one value in 240 lies beyond four standard deviations.
std::vector<float> Laplacian(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::exponential_distribution<float> magnitude(std::sqrt(2.0f));
  std::vector<float> x(n);
  for (float& v : x) v = random() % 2 ? magnitude(random) : -magnitude(random);
  return x;
}

std::vector<float> UnitGaussian(size_t n, uint32_t seed) { return Gaussian(n, 1.0f, seed); }

// Mean squared error of latents of unit variance at `bits` bits.
double Distortion(ScaleFormat scales, int bits, int group_size,
                  std::vector<float> (*latents)(size_t, uint32_t) = UnitGaussian) {
  const PagePlan plan =
      PagePlan::Make(std::vector<uint8_t>(64, static_cast<uint8_t>(bits)), scales, group_size);
  double sum = 0;
  size_t n = 0;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const auto x = latents(static_cast<size_t>(plan.rank) * plan.page_tokens, seed);
    const auto y = Decode(Active(), plan, Encode(Active(), plan, x));
    for (size_t i = 0; i < x.size(); ++i) sum += (x[i] - y[i]) * (x[i] - y[i]);
    n += x.size();
  }
  return sum / static_cast<double>(n);
}

// --- the plan ---

TEST(PagePlan, TakesExactlySixteenBytesPerBitQuadAndBlock) {
  for (int b = 1; b <= 8; ++b) {
    for (int channels = 1; channels <= 9; ++channels) {
      const PagePlan plan = PagePlan::Make(
          std::vector<uint8_t>(static_cast<size_t>(channels), static_cast<uint8_t>(b)),
          ScaleFormat::kLog8, 32);
      const unsigned quads = static_cast<unsigned>(channels + 3) / 4;
      EXPECT_EQ(plan.block_bytes, 16u * b * quads);
      EXPECT_EQ(plan.page_bytes(), 16u * b * quads + 4 * quads);
    }
  }
  EXPECT_EQ(PagePlan::Make({16, 16}, ScaleFormat::kMinMax, 32).page_bytes(), 2u * 32 * 2);
  EXPECT_EQ(PagePlan::Make({32, 32, 32}, ScaleFormat::kMinMax, 32).page_bytes(), 3u * 32 * 4);
}

TEST(PagePlan, CountsScalesPerGroupAndChannel) {
  // 16 channels, the first quarter at 4 bits, the others at 2: 0.625 * 4 bits of codes per channel.
  std::vector<uint8_t> bits(16, 2);
  std::fill(bits.begin(), bits.begin() + 4, 4);
  const PagePlan minmax = PagePlan::Make(bits, ScaleFormat::kMinMax, 32);
  EXPECT_EQ(minmax.code_bits_per_token(), 4 * 4 + 12 * 2);
  EXPECT_EQ(minmax.stored_bits_per_token(), 4 * 4 + 12 * 2 + 16);  // 32 bits per 32 tokens
  const PagePlan log8 = PagePlan::Make(bits, ScaleFormat::kLog8, 32);
  EXPECT_EQ(log8.stored_bits_per_token(), 4 * 4 + 12 * 2 + 16 * 0.25);
  const PagePlan small = PagePlan::Make(bits, ScaleFormat::kMinMax, 8);
  EXPECT_EQ(small.page_tokens, 32);
  EXPECT_EQ(small.groups(), 4);
  EXPECT_EQ(small.scale_bytes, 4u * 16 * 4);
  const PagePlan large = PagePlan::Make(bits, ScaleFormat::kMinMax, 128);
  EXPECT_EQ(large.page_tokens, 128);
  EXPECT_EQ(large.blocks(), 4);
  EXPECT_EQ(large.groups(), 1);
  EXPECT_EQ(large.page_bytes(), 4u * 4 * (4 * 4 + 12 * 2) + 16 * 4);
}

TEST(PagePlan, SortsChannelsByBitsIntoQuads) {
  const PagePlan plan = PagePlan::Make({3, 8, 3, 1, 3, 3, 3, 8}, ScaleFormat::kLog8, 32);
  EXPECT_EQ(plan.channel,
            (std::vector<int16_t>{1, 7, -1, -1, 0, 2, 4, 5, 6, -1, -1, -1, 3, -1, -1, -1}));
  EXPECT_EQ(plan.slot, (std::vector<int16_t>{4, 0, 5, 12, 6, 7, 8, 1}));
  EXPECT_FALSE(plan.in_order);
  EXPECT_EQ(plan.quad_offset(0), 0u);
  EXPECT_EQ(plan.quad_offset(1), 128u);
  EXPECT_EQ(plan.quad_offset(2), 128u + 48);
  EXPECT_EQ(plan.quad_offset(3), 128u + 2 * 48);
  EXPECT_EQ(plan.block_bytes, 128u + 2 * 48 + 16);
  EXPECT_TRUE(PagePlan::Make({4, 4, 4, 4, 2, 2, 2, 2}, ScaleFormat::kLog8, 32).in_order);
  EXPECT_FALSE(PagePlan::Make({4, 4, 4, 2, 2, 2, 2, 2}, ScaleFormat::kLog8, 32).in_order);
}

TEST(PagePlan, BoundsQueriesSoThatSumsFit32Bits) {
  for (const int channels : {1, 64, 256, 1024}) {
    for (const int bits : {1, 4, 8}) {
      for (const ScaleFormat scales : {ScaleFormat::kMinMax, ScaleFormat::kLog8}) {
        const PagePlan plan = PagePlan::Make(
            std::vector<uint8_t>(static_cast<size_t>(channels), static_cast<uint8_t>(bits)), scales,
            32);
        const int64_t level = bits == 8                        ? 255
                              : scales == ScaleFormat::kMinMax ? (1 << bits) - 1
                              : bits == 1                      ? 128
                                                               : 208;
        EXPECT_LT(channels * level * plan.most_query, int64_t{1} << 31);
        EXPECT_GT(plan.most_query, 8000);
      }
    }
  }
}

TEST(PagePlan, AcceptsNoChannels) {
  const PagePlan plan = PagePlan::Make({}, ScaleFormat::kLog8, 32);
  EXPECT_EQ(plan.page_bytes(), 0u);
  EXPECT_FALSE(plan.raw);
}

TEST(PagePlan, RejectsWhatTheFormatCannotHold) {
  const auto make = [](std::vector<uint8_t> bits, int group) {
    return PagePlan::Make(std::move(bits), ScaleFormat::kMinMax, group);
  };
  EXPECT_THROW(make({0}, 32), ConfigError);
  EXPECT_THROW(make({4, 9}, 32), ConfigError);
  EXPECT_THROW(make({16, 4}, 32), ConfigError);
  EXPECT_THROW(make({4, 16}, 32), ConfigError);
  EXPECT_THROW(make({16, 32}, 32), ConfigError);
  EXPECT_THROW(make({4}, 24), ConfigError);
  EXPECT_THROW(make({4}, 256), ConfigError);
  EXPECT_THROW(make(std::vector<uint8_t>(kMaxRank + 1, 4), 32), ConfigError);
  EXPECT_NO_THROW(make(std::vector<uint8_t>(kMaxRank, 4), 32));
  try {
    make({4, 12}, 32);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("12 bits"), std::string::npos) << error.what();
  }
}

// --- the bytes ---

// Where a code of `bits` ones lies: byte and mask of each of its bits, read off the picture of the
// format, not computed.
struct CodePlace {
  CodeOrder order;
  int bits, lane, token;
  std::vector<std::pair<int, uint8_t>> bytes;
};

TEST(PageBytes, PutACodeWhereTheFormatSays) {
  constexpr CodeOrder kScores = CodeOrder::kForScores, kSums = CodeOrder::kForSums;
  const CodePlace places[] = {
      // Scores: code 4 t + l.
      {kScores, 8, 2, 5, {{22, 0xff}}},
      {kScores, 4, 1, 0, {{1, 0x0f}}},
      {kScores, 4, 1, 17, {{5, 0xf0}}},               // code 69 = 64 + 5
      {kScores, 2, 3, 9, {{7, 0x0c}}},                // code 39 = 32 + 7
      {kScores, 1, 0, 4, {{0, 0x02}}},                // code 16
      {kScores, 3, 3, 31, {{31, 0xc0}, {47, 0x80}}},  // code 127; planes of 32 and 16 bytes
      {kScores, 6, 0, 31, {{60, 0xf0}, {92, 0xc0}}},  // code 124; planes of 64 and 32 bytes
      {kScores, 7, 1, 1, {{5, 0x0f}, {69, 0x03}, {101, 0x01}}},
      // Sums: code 16 (t / 4) + 4 l + t mod 4.
      {kSums, 8, 2, 5, {{25, 0xff}}},
      {kSums, 4, 1, 0, {{4, 0x0f}}},
      {kSums, 4, 1, 17, {{5, 0xf0}}},  // code 69
      {kSums, 2, 3, 9, {{13, 0x0c}}},  // code 45
      {kSums, 1, 0, 4, {{0, 0x02}}},
      {kSums, 5, 3, 30, {{62, 0xf0}, {78, 0x80}}},  // code 126
  };
  for (const KernelTable* kernels : AllKernels()) {
    for (const CodePlace& place : places) {
      SCOPED_TRACE(std::string(kernels->name) + " bits " + std::to_string(place.bits) + " lane " +
                   std::to_string(place.lane) + " token " + std::to_string(place.token));
      const PagePlan plan =
          PagePlan::Make(std::vector<uint8_t>(4, static_cast<uint8_t>(place.bits)),
                         ScaleFormat::kMinMax, 32, 0, place.order);
      // Channels that are 0 but for one token are code 0 and the highest code.
      const float top = static_cast<float>((1 << place.bits) - 1);
      std::vector<float> x(4 * 32, 0.0f);
      x[place.lane * 32 + place.token] = top;
      std::vector<uint8_t> expected(plan.code_bytes(), 0);
      for (const auto& [byte, mask] : place.bytes) expected[byte] = mask;
      std::vector<uint8_t> page = Encode(*kernels, plan, x);
      for (const auto& [byte, mask] : place.bytes) EXPECT_EQ(page[byte] & mask, mask);
      EXPECT_EQ(Decode(*kernels, plan, page), x);
      // And alone: the bytes that hold only this code decode to a channel of zeros but for it.
      std::copy(expected.begin(), expected.end(), page.begin());
      const std::vector<float> alone = Decode(*kernels, plan, page);
      for (int t = 0; t < 32; ++t) {
        EXPECT_EQ(alone[place.lane * 32 + t], t == place.token ? top : 0.0f) << t;
      }
      // Nothing is written past the page.
      for (size_t i = plan.page_bytes(); i < page.size(); ++i) EXPECT_EQ(page[i], 0xcd);
    }
  }
}

TEST(PageBytes, HoldScalesByGroupAfterAllBlocks) {
  // Two channels, groups of 8 tokens that differ in scale and zero: group g of channel c spans [g,
  // g + 2 (c + 1)].
  const PagePlan plan = PagePlan::Make({2, 2}, ScaleFormat::kMinMax, 8);
  std::vector<float> x(2 * 32);
  for (int c = 0; c < 2; ++c) {
    for (int t = 0; t < 32; ++t) {
      x[c * 32 + t] = static_cast<float>(t / 8 + (t % 2) * 3 * (c + 1));
    }
  }
  for (const KernelTable* kernels : AllKernels()) {
    const std::vector<uint8_t> page = Encode(*kernels, plan, x);
    const uint8_t* scales = page.data() + plan.code_bytes();
    for (int g = 0; g < 4; ++g) {
      for (int c = 0; c < 2; ++c) {
        uint16_t scale, zero;
        std::memcpy(&scale, scales + 2 * (g * 4 + c), 2);
        std::memcpy(&zero, scales + 32 + 2 * (g * 4 + c), 2);
        EXPECT_EQ(F16ToF32(scale), static_cast<float>(c + 1)) << kernels->name;
        EXPECT_EQ(F16ToF32(zero), g + 1.5f * (c + 1)) << kernels->name;
      }
    }
    EXPECT_EQ(Decode(*kernels, plan, page), x) << kernels->name;
  }
}

TEST(PageBytes, RawChannelsAreTheNumbersThemselves) {
  const auto x = Gaussian(2 * 32, 3.0f, 1);
  const PagePlan f32 = PagePlan::Make({32, 32}, ScaleFormat::kMinMax, 32);
  const PagePlan f16 = PagePlan::Make({16, 16}, ScaleFormat::kMinMax, 32);
  for (const KernelTable* kernels : AllKernels()) {
    EXPECT_EQ(Decode(*kernels, f32, Encode(*kernels, f32, x)), x) << kernels->name;
    const std::vector<uint8_t> page = Encode(*kernels, f16, x);
    for (size_t i = 0; i < x.size(); ++i) {
      uint16_t half;
      std::memcpy(&half, page.data() + 2 * i, 2);
      EXPECT_EQ(half, F32ToF16(x[i])) << kernels->name;
    }
  }
}

// --- scales and levels ---

TEST(Log8, EveryScaleReadsBackAsItself) {
  for (int e = 0; e < 256; ++e) {
    EXPECT_EQ(Log8FromFloat(Log8Value(static_cast<uint8_t>(e))), e);
  }
  for (int e = 1; e < 256; ++e) EXPECT_GT(Log8Value(e), Log8Value(e - 1));
  EXPECT_EQ(Log8Value(0), std::ldexp(1.0f, -16));
  EXPECT_EQ(Log8Value(255), 61440.0f);
  EXPECT_EQ(Log8Value(16 * 8 + 4), 1.5f);
}

TEST(Log8, ChoosesTheNearestScaleByRatio) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> exponent(-15.9f, 15.9f);
  for (int i = 0; i < 20000; ++i) {
    const float x = std::exp2(exponent(random));
    const uint8_t chosen = Log8FromFloat(x);
    const auto distance = [x](int e) {
      return std::fabs(std::log2(Log8Value(static_cast<uint8_t>(e)) / x));
    };
    EXPECT_LE(distance(chosen), distance(std::max(chosen - 1, 0)) + 1e-6);
    EXPECT_LE(distance(chosen), distance(std::min(chosen + 1, 255)) + 1e-6);
    EXPECT_LE(distance(chosen), std::log2(9.0 / 8) / 2 + 1e-6);
  }
}

TEST(Log8, SaturatesAtBothEnds) {
  EXPECT_EQ(Log8FromFloat(0.0f), 0);
  EXPECT_EQ(Log8FromFloat(1e-30f), 0);
  EXPECT_EQ(Log8FromFloat(61000.0f), 255);
  EXPECT_EQ(Log8FromFloat(1e9f), 255);
  EXPECT_EQ(Log8FromFloat(INFINITY), 255);
}

TEST(Levels, AreTheLloydMaxQuantiserOfAGaussian) {
  // Levels of the exact quantiser (Max 1960), positive half.
  const std::vector<std::vector<double>> exact = {
      {0.7979},
      {0.4528, 1.510},
      {0.2451, 0.7560, 1.344, 2.152},
      {0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733}};
  for (int b = 1; b <= 4; ++b) {
    const auto& levels = LloydMaxLevels(b);
    const int half = 1 << (b - 1);
    for (int i = 0; i < half; ++i) {
      EXPECT_EQ(levels[half + i], -levels[half - 1 - i]);
      EXPECT_NEAR(levels[half + i] * Log8Unit(b), exact[b - 1][i], 0.5 * Log8Unit(b) + 1e-3);
    }
    for (int i = 2 * half; i < 16; ++i) EXPECT_EQ(levels[i], 0);
  }
}

TEST(Levels, UniformStepsMinimiseTheGaussianError) {
  // Error of 2^b levels at (i + 1/2) step by midpoint integration of the density.
  const auto error = [](int bits, double step) {
    double sum = 0;
    const double dx = 1e-4;
    const double last = std::ldexp(1.0, bits - 1) - 0.5;
    for (double x = dx / 2; x < 9; x += dx) {
      const double level = std::min(std::floor(x / step) + 0.5, last) * step;
      sum += 2 * dx * (x - level) * (x - level) * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
    }
    return sum;
  };
  for (int b = 5; b <= 8; ++b) {
    const double step = Log8Unit(b);
    EXPECT_LT(error(b, step), error(b, step * 1.01)) << b;
    EXPECT_LT(error(b, step), error(b, step * 0.99)) << b;
  }
}

// --- error ---

TEST(MinMaxCodes, ErrorIsAtMostHalfAStep) {
  for (const KernelTable* kernels : AllKernels()) {
    for (int bits = 1; bits <= 8; ++bits) {
      for (const int group : {8, 16, 32, 64, 128}) {
        const PagePlan plan = PagePlan::Make(std::vector<uint8_t>(5, static_cast<uint8_t>(bits)),
                                             ScaleFormat::kMinMax, group);
        auto x = Gaussian(5u * plan.page_tokens, 2.0f, 100 + bits);
        for (int t = 0; t < plan.page_tokens; ++t) x[t] += 7.0f;  // a mean that zero must carry
        const auto y = Decode(*kernels, plan, Encode(*kernels, plan, x));
        for (size_t i = 0; i < x.size(); ++i) {
          const float* first = x.data() + i / group * group;
          const auto [min, max] = std::minmax_element(first, first + group);
          const float range = *max - *min;
          // fp16 rounds the zero and the scale.
          const float largest = std::max(std::fabs(*min), std::fabs(*max));
          const float bound = range / ((1 << bits) - 1) / 2 + (largest + range) / 2048;
          ASSERT_NEAR(x[i], y[i], bound) << kernels->name << " bits " << bits;
        }
      }
    }
  }
}

TEST(Log8Codes, ErrorIsAtMostHalfTheWidestGapInsideTheRange) {
  for (const KernelTable* kernels : AllKernels()) {
    for (int bits = 1; bits <= 8; ++bits) {
      const PagePlan plan = PagePlan::Make({static_cast<uint8_t>(bits)}, ScaleFormat::kLog8, 32);
      const auto x = Gaussian(32, 0.3f, 200 + bits);
      const std::vector<uint8_t> page = Encode(*kernels, plan, x);
      const auto y = Decode(*kernels, plan, page);
      const float scale = Log8Value(page[plan.code_bytes()]);
      std::vector<float> levels;
      for (int i = 0; i < 1 << bits; ++i) {
        const float level = bits <= 4 ? LloydMaxLevels(bits)[i] : i - (1 << (bits - 1)) + 0.5f;
        levels.push_back(level * scale * Log8Unit(bits));
      }
      for (int t = 0; t < 32; ++t) {
        float nearest = INFINITY;
        for (const float level : levels) nearest = std::min(nearest, std::fabs(x[t] - level));
        EXPECT_NEAR(std::fabs(x[t] - y[t]), nearest, 1e-5f) << kernels->name << " bits " << bits;
      }
    }
  }
}

// Squared error of a channel's codes when its scale byte is `e`.
double ErrorAtScale(int bits, int e, const std::vector<float>& x) {
  double sum = 0;
  for (const float v : x) {
    double nearest = INFINITY;
    for (int i = 0; i < 1 << bits; ++i) {
      const double level = bits <= 4 ? LloydMaxLevels(bits)[i] : i - (1 << (bits - 1)) + 0.5;
      const double value = level * Log8Value(static_cast<uint8_t>(e)) * Log8Unit(bits);
      nearest = std::min(nearest, std::fabs(value - v));
    }
    sum += nearest * nearest;
  }
  return sum;
}

TEST(Log8Codes, ScaleIsAboutTheBestOfAll) {
  for (int bits = 1; bits <= 8; ++bits) {
    const PagePlan plan = PagePlan::Make({static_cast<uint8_t>(bits)}, ScaleFormat::kLog8, 32);
    double chosen = 0, best = 0;
    for (uint32_t seed = 0; seed < 60; ++seed) {
      const auto x = seed % 2 ? Laplacian(32, seed) : UnitGaussian(32, seed);
      double least = INFINITY;
      for (int e = 80; e < 190; ++e) least = std::min(least, ErrorAtScale(bits, e, x));
      const int scale = Encode(Active(), plan, x)[plan.code_bytes()];
      EXPECT_LE(ErrorAtScale(bits, scale, x), 1.5 * least) << bits << " bits, seed " << seed;
      chosen += ErrorAtScale(bits, scale, x);
      best += least;
    }
    EXPECT_LE(chosen, 1.02 * best) << bits;
  }
}

TEST(Log8Codes, OneLargeValueIsNotClipped) {
  // As large as one of 32 values can be: 5.6 times their root mean square.
  for (const KernelTable* kernels : AllKernels()) {
    for (int bits = 4; bits <= 8; ++bits) {
      const PagePlan plan = PagePlan::Make({static_cast<uint8_t>(bits)}, ScaleFormat::kLog8, 32);
      for (const float large : {-40.0f, 40.0f}) {
        auto x = Gaussian(32, 0.1f, bits);
        x[17] = large;
        const auto y = Decode(*kernels, plan, Encode(*kernels, plan, x));
        EXPECT_NEAR(y[17], large, bits == 4 ? 6.0f : 40.0f / (1 << (bits - 1)))
            << kernels->name << " bits " << bits;
      }
    }
  }
}

TEST(Distortion, OfMinMaxCodesIsTheKnownOne) {
  // Unit Gaussian, groups of 32 tokens. Measured independently of this code; one bit is worse than
  // dropping the channel.
  EXPECT_NEAR(Distortion(ScaleFormat::kMinMax, 1, 32), 1.96, 0.06);
  EXPECT_NEAR(Distortion(ScaleFormat::kMinMax, 2, 32), 0.154, 0.004);
  EXPECT_NEAR(Distortion(ScaleFormat::kMinMax, 3, 32), 0.0281, 0.0006);
  EXPECT_NEAR(Distortion(ScaleFormat::kMinMax, 4, 32), 0.0061, 0.0002);
  // A fine quantiser's error is step^2 / 12, less at the two of 32 tokens that are the ends; the
  // range of 32 Gaussians has mean square 17.1.
  for (const int bits : {6, 8}) {
    const double steps = (1 << bits) - 1;
    const double square_range = Distortion(ScaleFormat::kMinMax, bits, 32) * steps * steps * 12;
    EXPECT_GT(square_range, 17.1 * 30 / 32 * 0.99) << bits;
    EXPECT_LT(square_range, 17.1 * 1.05) << bits;  // fp16 zeros cost a little
  }
}

TEST(Distortion, OfLog8CodesIsTheKnownOne) {
  // Groups of 32, measured independently of this code as the least over all scales.
  const double gaussian[9] = {0, .3544, .1056, .02619, .00622, .00193, .000488, .000122, .0000308};
  const double laplacian[9] = {0, .4837, .1606, .03817, .00824, .00306, .000767, .000193, .0000484};
  for (int bits = 1; bits <= 8; ++bits) {
    EXPECT_NEAR(Distortion(ScaleFormat::kLog8, bits, 32) / gaussian[bits], 1.0, 0.03) << bits;
    EXPECT_NEAR(Distortion(ScaleFormat::kLog8, bits, 32, Laplacian) / laplacian[bits], 1.0, 0.05)
        << bits;
  }
}

TEST(Distortion, OfLog8CodesStaysBelowThatOfTheGaussianQuantiser) {
  // A scale of its own lets a group do better than the best quantiser of the whole distribution.
  const double exact[9] = {0, .3634, .1175, .03455, .00950, .00350, .00104, .000304, .0000877};
  for (const int group_size : {8, 16, 32, 64, 128}) {
    for (int bits = 1; bits <= 8; ++bits) {
      EXPECT_LT(Distortion(ScaleFormat::kLog8, bits, group_size), exact[bits])
          << group_size << " tokens, " << bits << " bits";
    }
  }
}

// --- degenerate groups ---

TEST(MinMaxCodes, ConstantGroupsAreExactUpToFp16) {
  const PagePlan plan = PagePlan::Make({1, 3, 8}, ScaleFormat::kMinMax, 32);
  for (const float value : {0.0f, -0.0f, 1.0f, -3.25f, 1e-8f, 6e4f, -6.1e4f, 0.1f}) {
    const std::vector<float> x(3 * 32, value);
    for (const KernelTable* kernels : AllKernels()) {
      for (const float y : Decode(*kernels, plan, Encode(*kernels, plan, x))) {
        ASSERT_EQ(y, F16ToF32(F32ToF16(value))) << kernels->name;
      }
    }
  }
}

TEST(Codes, StayFiniteForLatentsBeyondFp16) {
  // |x| <= 65504 in a head of 128 dimensions bounds a latent by 65504 * sqrt(128).
  std::vector<float> x(32);
  for (int t = 0; t < 32; ++t) x[t] = (t % 2 ? 1 : -1) * 7.4e5f;
  for (const KernelTable* kernels : AllKernels()) {
    for (const ScaleFormat scales : {ScaleFormat::kMinMax, ScaleFormat::kLog8}) {
      for (const int bits : {1, 4, 8, 16}) {
        const PagePlan plan = PagePlan::Make({static_cast<uint8_t>(bits)}, scales, 32);
        for (const float y : Decode(*kernels, plan, Encode(*kernels, plan, x))) {
          ASSERT_TRUE(std::isfinite(y)) << kernels->name << " bits " << bits;
        }
      }
    }
  }
}

TEST(Log8Codes, ZerosDecodeToNothingThatMatters) {
  const std::vector<float> x(32, 0.0f);
  for (const KernelTable* kernels : AllKernels()) {
    for (const int bits : {1, 4, 5, 8}) {
      const PagePlan plan = PagePlan::Make({static_cast<uint8_t>(bits)}, ScaleFormat::kLog8, 32);
      for (const float y : Decode(*kernels, plan, Encode(*kernels, plan, x))) {
        EXPECT_LT(std::fabs(y), 2e-5f) << kernels->name;  // the smallest scale is 2^-16
      }
    }
  }
}

}  // namespace
}  // namespace palu
