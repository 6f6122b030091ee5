// The sibling methods: what uniform, kivi, svdq and rabitq claim, and their sizes by hand. That
// they attend to what they store, trim, fork and count like palu is shown by the tests of the
// cache.
#include "fit/basis.h"
#include "fit/bit_plan.h"
#include "test_util.h"

namespace palu {
namespace {

using namespace test;

// Rows of unit length.
Floats UnitRows(const Dims& dims, uint64_t seed) {
  Floats x = Gaussian(dims.size(), seed);
  for (size_t row = 0; row < x.size(); row += dims.dim) {
    double square = 0;
    for (int64_t d = 0; d < dims.dim; ++d) square += static_cast<double>(x[row + d]) * x[row + d];
    for (int64_t d = 0; d < dims.dim; ++d) x[row + d] /= static_cast<float>(std::sqrt(square));
  }
  return x;
}

double MeanCosine(const Floats& a, const Floats& b, int64_t dim) {
  double sum = 0;
  for (size_t row = 0; row < a.size(); row += dim) {
    double ab = 0, aa = 0, bb = 0;
    for (int64_t d = 0; d < dim; ++d) {
      const double x = a[row + d], y = b[row + d];
      ab += x * y, aa += x * x, bb += y * y;
    }
    sum += ab / std::sqrt(aa * bb);
  }
  return sum / (static_cast<double>(a.size()) / static_cast<double>(dim));
}

struct Decoded {
  Floats k, v;
  CacheStats stats;
};

Decoded RoundTrip(const std::string& config, const Floats& k, const Floats& v, const Dims& dims) {
  KVCache cache = MakeCache(config, static_cast<int>(dims.heads), static_cast<int>(dims.dim));
  const KVCache::KV kv = cache.UpdateAndFetch(Whole(k, dims), Whole(v, dims));
  return {ToFloats(kv.k), ToFloats(kv.v), cache.Stats()};
}

// ---- uniform ----

TEST(Uniform, IsTheMinMaxQuantiserPerChannelAnd32Tokens) {
  const Dims dims{1, 2, 64, 48};
  const Floats k = Gaussian(dims.size(), 1), v = Gaussian(dims.size(), 2, 3);
  const Decoded decoded = RoundTrip("uniform:bits=3", k, v, dims);
  ASSERT_EQ(decoded.stats.encoded_tokens, 64);
  for (int64_t h = 0; h < dims.heads; ++h) {
    for (int64_t d = 0; d < dims.dim; ++d) {
      for (int64_t first = 0; first < 64; first += 32) {
        float low = INFINITY, high = -INFINITY;
        for (int64_t t = first; t < first + 32; ++t) {
          low = std::min(low, k[dims.at(0, h, t, d)]);
          high = std::max(high, k[dims.at(0, h, t, d)]);
        }
        for (int64_t t = first; t < first + 32; ++t) {
          const float x = k[dims.at(0, h, t, d)], step = (high - low) / 7;
          const float want = low + step * std::round((x - low) / step);
          // fp16 scale and zero; a value halfway between two levels may take either.
          const float got = decoded.k[dims.at(0, h, t, d)];
          ASSERT_LT(std::min(std::fabs(got - want), std::fabs(got - x) - step / 2), 0.01 * step);
        }
      }
    }
  }
}

// ---- KIVI ----

TEST(Kivi, CosinesOfUnitGaussians) {
  const Dims dims{1, 1, 512, 128};
  const Floats k = UnitRows(dims, 3), v = UnitRows(dims, 4);
  const std::vector<std::pair<int, double>> least = {{2, 0.90}, {3, 0.96}, {4, 0.99}, {8, 0.999}};
  for (const auto& [bits, cosine] : least) {
    const Decoded decoded =
        RoundTrip("kivi:recent_tokens=0,bits=" + std::to_string(bits), k, v, dims);
    ASSERT_EQ(decoded.stats.encoded_tokens, 512);
    EXPECT_GE(MeanCosine(decoded.k, k, 128), cosine) << bits << " bits, keys";
    EXPECT_GE(MeanCosine(decoded.v, v, 128), cosine) << bits << " bits, values";
  }
}

TEST(Kivi, TwoBitsStoreThreeAndTheLast128TokensStayExact) {
  const Dims dims{1, 2, 700, 128};
  const Floats k = Gaussian(dims.size(), 5), v = Gaussian(dims.size(), 6);
  const Decoded decoded = RoundTrip("kivi", k, v, dims);
  EXPECT_EQ(decoded.stats.encoded_tokens, (700 - 128) / 32 * 32);
  EXPECT_DOUBLE_EQ(decoded.stats.code_bits, 3.0);
  EXPECT_DOUBLE_EQ(decoded.stats.assigned_avg_bits, 2.0);
  EXPECT_EQ(decoded.stats.rank_k, 0);
  const int64_t exact = decoded.stats.encoded_tokens;
  EXPECT_EQ(CopySlice(decoded.k, dims, exact, 700 - exact),
            RoundedTo(CopySlice(k, dims, exact, 700 - exact), DType::kF16));
}

TEST(Kivi, ScalesValuesPerTokenAndKeysPerChannel) {
  // One token and one channel are a thousand times larger than the rest.
  const Dims dims{1, 1, 64, 64};
  Floats x = Gaussian(dims.size(), 7);
  for (int64_t d = 0; d < 64; ++d) x[dims.at(0, 0, 5, d)] *= 1000;
  const Decoded by_token = RoundTrip("kivi:recent_tokens=0,bits=4", x, x, dims);
  const auto error = [&](const Floats& got, int64_t t) {
    return RelL2(CopySlice(got, dims, t, 1), CopySlice(x, dims, t, 1));
  };
  EXPECT_LT(error(by_token.v, 6), 0.1);  // V: the large token spoils only itself
  EXPECT_GT(error(by_token.k, 6), 1.0);  // K: it spoils the scale of its whole group
  x = Gaussian(dims.size(), 7);
  for (int64_t t = 0; t < 64; ++t) x[dims.at(0, 0, t, 5)] *= 1000;
  const Decoded by_channel = RoundTrip("kivi:recent_tokens=0,bits=4", x, x, dims);
  const auto channel_error = [&](const Floats& got) {
    double error = 0, size = 0;
    for (int64_t t = 0; t < 64; ++t) {
      const double truth = x[dims.at(0, 0, t, 6)], difference = got[dims.at(0, 0, t, 6)] - truth;
      error += difference * difference, size += truth * truth;
    }
    return std::sqrt(error / size);
  };
  EXPECT_LT(channel_error(by_channel.k), 0.1);
  EXPECT_GT(channel_error(by_channel.v), 1.0);
}

// ---- ggml's blocks ----

TEST(Blocks, HaveTheSizeAndTheErrorOfGgmls) {
  const Dims dims{1, 2, 256, 64};
  const Floats k = Gaussian(dims.size(), 16), v = Gaussian(dims.size(), 17);
  const Decoded q8 = RoundTrip("q8_0", k, v, dims), q4 = RoundTrip("q4_0", k, v, dims);
  EXPECT_DOUBLE_EQ(q8.stats.code_bits, 8.5);
  EXPECT_DOUBLE_EQ(q4.stats.code_bits, 4.5);
  EXPECT_DOUBLE_EQ(RoundTrip("q8_0/q4_0", k, v, dims).stats.code_bits, 6.5);
  // A step of (largest of 32) / 127 has an error of a step / sqrt(12).
  EXPECT_NEAR(RelL2(q8.k, k), 2.0 / 127 / std::sqrt(12), 0.001);
  EXPECT_NEAR(RelL2(q4.v, v), 2.0 / 8 / std::sqrt(12), 0.02);
}

// ---- SVDq ----

TEST(Svdq, ScheduleCutsTheRankIntoEightRuns) {
  const std::vector<uint8_t> sixty = ScheduleBits(60, false);
  ASSERT_EQ(sixty.size(), 60u);
  EXPECT_EQ(std::count(sixty.begin(), sixty.end(), 8), 8);
  EXPECT_EQ(std::count(sixty.begin(), sixty.end(), 4), 8);
  EXPECT_EQ(std::count(sixty.begin(), sixty.end(), 2), 8);
  EXPECT_EQ(std::count(sixty.begin(), sixty.end(), 1), 8 + 7);
  EXPECT_EQ(std::count(sixty.begin(), sixty.end(), 0), 3 * 7);
  EXPECT_TRUE(std::is_sorted(sixty.rbegin(), sixty.rend()));
  // Below 32 the zeros become ones, unless the rank was asked for.
  EXPECT_EQ(ScheduleBits(31, false).back(), 1);
  EXPECT_EQ(ScheduleBits(5, false), (std::vector<uint8_t>{8, 4, 2, 1, 1}));
  ExpectSays(MessageOf<ConfigError>([] { ScheduleBits(31, true); }), {"31", "too small", "32"});
  EXPECT_EQ(ScheduleBits(32, true).back(), 0);
}

TEST(Svdq, HasABasisPerHeadAndLeavesValuesAlone) {
  const Dims dims{1, 3, 320, 64};
  const Floats k = Planted(dims, Decay(20, 3, 0.8), 0.01, 8, 3), v = Gaussian(dims.size(), 9);
  const Decoded decoded = RoundTrip("svdq", k, v, dims);
  ASSERT_EQ(decoded.stats.encoded_tokens, 320);
  EXPECT_LT(RelL2(decoded.k, k), 0.45);  // channels of 1 and 0 bits
  EXPECT_EQ(decoded.v, RoundedTo(v, DType::kF16));
  EXPECT_LE(decoded.stats.rank_k, 40);
  EXPECT_EQ(decoded.stats.rank_v, 0);
}

TEST(Svdq, AnExplicitRankTooSmallForTheScheduleIsRefusedAtTheFit) {
  const Dims dims{1, 1, 96, 64};
  const Floats k = Gaussian(dims.size(), 10), v = Gaussian(dims.size(), 11);
  KVCache cache = MakeCache("svdq:rank=16", 1, 64);
  cache.Append(Whole(k, dims), Whole(v, dims));
  ExpectSays(MessageOf<ConfigError>([&] { cache.Seal(); }), {"rank=16", "too small", "32"});
  EXPECT_EQ(cache.size(), 96);
  EXPECT_EQ(cache.Stats().encoded_tokens, 0);
}

// ---- RaBitQ ----

TEST(Rabitq, AKeyOf128DimsTakes24Bytes) {
  const Dims dims{1, 1, 256, 128};
  const Floats k = Gaussian(dims.size(), 12), v = Gaussian(dims.size(), 13);
  const Decoded decoded = RoundTrip("rabitq", k, v, dims);
  ASSERT_EQ(decoded.stats.encoded_tokens, 256);
  // K: 16 bytes of signs, 8 of factors. V: 4 bits and fp16 scale and zero per 32 channels.
  EXPECT_EQ(decoded.stats.code_bytes, 256 * (16 + 64));
  EXPECT_EQ(decoded.stats.scale_bytes, 256 * (8 + 16));
}

TEST(Rabitq, EstimatesInnerProductsWithoutBias) {
  // The estimate of <k, q> for the query k itself is exact: that is what the factor is for.
  const Dims dims{1, 1, 512, 64};
  const Floats k = Planted(dims, Decay(64, 1, 0.97), 0, 14, 1, 0.5), v = Gaussian(dims.size(), 15);
  Floats mean(64);
  for (int64_t t = 0; t < 512; ++t) {
    for (int64_t d = 0; d < 64; ++d) mean[d] += k[dims.at(0, 0, t, d)] / 512;
  }
  for (const int bits : {1, 2, 3, 4}) {
    const Decoded decoded = RoundTrip("rabitq:bits=" + std::to_string(bits), k, v, dims);
    double bias = 0, error = 0, size = 0;
    for (int64_t t = 0; t < 512; ++t) {
      double dot = 0, square = 0, distance = 0;
      for (int64_t d = 0; d < 64; ++d) {
        const double x = k[dims.at(0, 0, t, d)] - mean[d];
        const double y = decoded.k[dims.at(0, 0, t, d)] - mean[d];
        dot += x * y, square += x * x, distance += (x - y) * (x - y);
      }
      EXPECT_NEAR(dot, square, 0.01 * square) << bits << " bits, token " << t;
      bias += dot - square, error += distance, size += square;
    }
    EXPECT_LT(std::fabs(bias), 1e-3 * size);
    // Angles shrink by about a half per bit.
    const double most[] = {0.8, 0.16, 0.05, 0.016};
    EXPECT_LT(error / size, most[bits - 1]) << bits << " bits";
  }
}

TEST(Rabitq, TheRotationIsOrthonormalForAnyDimension) {
  for (const int dim : {1, 33, 64, 80, 96, 128}) {
    const std::vector<double> rows = RandomHadamard(dim);
    const int padded = static_cast<int>(rows.size()) / dim;
    EXPECT_GE(padded, dim);
    EXPECT_LT(padded, 2 * dim);
    for (int i = 0; i < dim; ++i) {
      for (int j = 0; j <= i; ++j) {
        double dot = 0;
        for (int r = 0; r < padded; ++r) dot += rows[r * dim + i] * rows[r * dim + j];
        ASSERT_NEAR(dot, i == j ? 1 : 0, 1e-12);
      }
    }
  }
}

}  // namespace
}  // namespace palu
