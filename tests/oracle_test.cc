// The library against the one-file oracle: pages, fits, decoded K and V, attention, on random
// shapes.
#define PALU_REFERENCE_NO_MAIN
#include <map>

#include "fit/bit_plan.h"
#include "fit/moments.h"
#include "kernels/kernels.h"
#include "methods/layer_codec.h"
#include "reference/palu_in_one_file.cc"
#include "test_util.h"

namespace palu {
namespace {

using namespace test;
namespace oracle = palu_reference;

oracle::Options ToOptions(const KVCacheConfig& c, int head_dim, int64_t context) {
  oracle::Options o;
  o.rank = c.rank.value_or(0);
  o.energy_threshold = c.energy_threshold;
  o.energy_squares = c.energy_rule == EnergyRule::kSquares;
  o.rank_policy = c.rank_policy == RankPolicy::kMin   ? oracle::Options::kMin
                  : c.rank_policy == RankPolicy::kMax ? oracle::Options::kMax
                                                      : oracle::Options::kPerGroup;
  o.head_groups = c.n_head_groups;
  o.average_positions = c.key_fit == KeyFit::kAveraged;
  o.rotate_mean = c.key_mean == KeyMean::kRotated;
  o.context = context;
  o.fit_tokens = c.fit_tokens < 0 ? 8 * head_dim : c.fit_tokens;
  o.quantize_values = c.quantize_values;
  o.auto_bits = c.bit_plan == BitPlan::kAuto;
  o.budget = c.auto_bits;
  o.hi_bit = c.hi_bit, o.lo_bit = c.lo_bit, o.hi_fraction = c.hi_fraction;
  o.log8 = c.scales == ScaleFormat::kLog8;
  o.group_size = c.group_size;
  o.sink_tokens = c.sink_tokens, o.recent_tokens = c.recent_tokens;
  // The oracle's own table is compared below; channels of nearly equal gain need the same one.
  for (int bits = 0; bits <= 8; ++bits)
    o.distortion.push_back(Distortion(c.scales, c.group_size, bits));
  return o;
}

oracle::Rope ToOracle(const RopeParams& rope) {
  return {rope.pairing == RopePairing::kHalves, rope.inv_freq};
}

// One random layer: shape, options and data.
struct Case {
  std::string config;
  int heads, q_heads;
  Dims kd, vd;
  int64_t context = 4096;
  RopeParams rope;
  Floats k, v;
};

Case MakeCase(uint64_t seed) {
  Random random(seed);
  const auto pick = [&](auto... values) {
    const std::vector<std::common_type_t<decltype(values)...>> all{values...};
    return all[random.Between(0, static_cast<int64_t>(all.size()) - 1)];
  };
  Case c;
  c.heads = static_cast<int>(random.Between(1, 5));
  c.q_heads = c.heads * static_cast<int>(random.Between(1, 3));
  const int dk = pick(16, 32, 48, 64), dv = pick(16, 40, 64);
  const int64_t fit = random.Between(dk + dv, 220), tokens = fit + random.Between(0, 200);
  c.kd = {1, c.heads, tokens, dk};
  c.vd = {1, c.heads, tokens, dv};
  c.rope = Rope(pick(dk, dk / 2), 10000, pick(RopePairing::kHalves, RopePairing::kInterleaved));
  const int groups = static_cast<int>(random.Between(1, 4));
  c.config =
      "palu:n_head_groups=" + std::to_string(groups) + ",fit_tokens=" + std::to_string(fit) +
      ",group_size=" + std::to_string(pick(8, 16, 32, 64, 128)) +
      ",sink_tokens=" + std::to_string(random.Between(0, 5)) +
      ",recent_tokens=" + std::to_string(random.Between(0, 40)) +
      ",scales=" + pick("log8", "minmax") + ",bits=" + pick("auto:2.5", "auto:4", "mixed") +
      ",quantize_values=" + pick("true", "true", "false") +
      pick(",key_fit=averaged,key_mean=rotated", ",key_fit=averaged,key_mean=fixed",
           ",key_fit=prompt") +
      pick("", ",rank=9", ",energy_threshold=0.9", ",energy_threshold=0.95,energy_rule=squares") +
      ",rank_policy=" + pick("min", "max", "per_group");
  c.k = RopedKeys(c.kd, c.rope, seed + 1, groups);
  c.v = Planted(c.vd, Decay(dv, 1.0, 0.9), 0, seed + 2, groups, 0.2);
  return c;
}

struct OracleLayer {
  oracle::Options options;
  oracle::Side k, v;
};

OracleLayer RunOracle(const Case& c, oracle::Options options) {
  const oracle::Rope rope = ToOracle(c.rope);
  return {options,
          oracle::Encode(TokenMajor(c.k, c.kd), c.heads, static_cast<int>(c.kd.dim), options, true,
                         &rope, false),
          oracle::Encode(TokenMajor(c.v, c.vd), c.heads, static_cast<int>(c.vd.dim), options,
                         options.quantize_values, nullptr, true)};
}

OracleLayer RunOracle(const Case& c) {
  return RunOracle(
      c, ToOptions(KVCacheConfig::Parse(c.config), static_cast<int>(c.kd.dim), c.context));
}

// Feeds the library in random chunks.
KVCache RunLibrary(const Case& c, uint64_t seed) {
  KVCache cache = MakeCache(c.config, c.heads, static_cast<int>(c.kd.dim),
                            {.dim_v = static_cast<int>(c.vd.dim), .context = c.context});
  Random random(seed);
  for (int64_t at = 0; at < c.kd.tokens;) {
    const int64_t n = std::min(c.kd.tokens - at, random.Between(1, 90));
    Feed(cache, c.k, c.kd, c.v, c.vd, at, n, &c.rope);
    at += n;
  }
  return cache;
}

// The two make the same error against the original, and differ from each other by less than a share
// of it: a code on the border between two levels may fall either way. Averaged keys have pairs of
// axes of nearly equal variance, which f32 rounding turns a little, so more of their codes sit on a
// border.
void ExpectSameCodes(const Floats& library, const oracle::Vec& expected, const Floats& original,
                     double share) {
  const double error = RelL2(expected, original);
  EXPECT_LT(RelL2(library, expected), share * error + 1e-5);
  EXPECT_NEAR(RelL2(library, original), error, 0.03 * error + 1e-5);
}

// The oracle is slow and plain; its result of a seed serves all tests.
struct Expected {
  Case data;
  OracleLayer layer;
  oracle::Vec k, v;  // decoded
};

const Expected& ExpectedOf(int seed) {
  static std::map<int, Expected> all;
  const auto [at, is_new] = all.try_emplace(seed);
  if (is_new) {
    Expected& e = at->second;
    e.data = MakeCase(seed);
    e.layer = RunOracle(e.data);
    e.k = oracle::Decode(e.layer.k, e.layer.options);
    e.v = oracle::Decode(e.layer.v, e.layer.options);
  }
  return at->second;
}

class OracleTest : public testing::TestWithParam<int> {};

TEST_P(OracleTest, DecodesTheSameKAndV) {
  const Case& c = ExpectedOf(GetParam()).data;
  SCOPED_TRACE(c.config);
  const OracleLayer& expected = ExpectedOf(GetParam()).layer;
  const KVCache cache = RunLibrary(c, GetParam());
  const CacheStats stats = cache.Stats();
  EXPECT_EQ(stats.encoded_tokens, expected.k.encoded);
  EXPECT_EQ(stats.code_bytes + stats.scale_bytes,
            oracle::PageBytes(expected.k, expected.options) +
                oracle::PageBytes(expected.v, expected.options));
  size_t rank_k = 0, rank_v = 0;
  for (const oracle::Basis& b : expected.k.bases) rank_k = std::max(rank_k, b.bits.size());
  for (const oracle::Basis& b : expected.v.bases) rank_v = std::max(rank_v, b.bits.size());
  EXPECT_EQ(stats.rank_k, static_cast<int>(rank_k));
  EXPECT_EQ(stats.rank_v, static_cast<int>(rank_v));
  const KVCache::KV kv = cache.Reconstruct();
  ExpectSameCodes(ToFloats(kv.k), ExpectedOf(GetParam()).k, c.k,
                  expected.options.average_positions ? 0.4 : 0.1);
  ExpectSameCodes(ToFloats(kv.v), ExpectedOf(GetParam()).v, c.v, 0.1);
}

TEST_P(OracleTest, AttendsTheSame) {
  const Case& c = ExpectedOf(GetParam()).data;
  SCOPED_TRACE(c.config);
  const OracleLayer& expected = ExpectedOf(GetParam()).layer;
  const KVCache cache = RunLibrary(c, GetParam());
  Random random(GetParam());
  const Dims qd{1, c.q_heads, random.Between(1, 9), c.kd.dim};
  const Floats q = Gaussian(qd.size(), GetParam() + 5);
  const Floats sinks = Gaussian(c.q_heads, GetParam() + 6);
  Floats mask(qd.tokens * c.kd.tokens);
  for (float& m : mask)
    m = random.Uniform() < 0.1 ? -INFINITY : static_cast<float>(random.Uniform());
  for (int64_t i = 0; i < qd.tokens; ++i) mask[i * c.kd.tokens] = 0;  // something stays visible
  struct {
    AttendArgs library;
    oracle::AttendOptions reference;
  } variants[4];
  variants[1].library.scale = 0.3f, variants[1].library.soft_cap = 5;
  variants[1].reference.scale = 0.3f, variants[1].reference.soft_cap = 5;
  variants[2].library.sinks = variants[2].reference.sinks = sinks.data();
  variants[2].library.causal = variants[2].reference.causal = false;
  variants[3].library.mask = variants[3].reference.mask = mask.data();
  for (const auto& variant : variants) {
    const Floats got = Attend(cache, q, qd, variant.library);
    const oracle::Vec want = oracle::Attend(q, c.q_heads, qd.tokens, expected.k, expected.v,
                                            expected.options, variant.reference);
    EXPECT_LT(RelL2(got, want), 0.02);
  }
}

// Pages apart, the library is compared on its own decoded K and V: there it has to be exact.
TEST_P(OracleTest, AttendMatchesPlainAttentionOverReconstruct) {
  const Case& c = ExpectedOf(GetParam()).data;
  SCOPED_TRACE(c.config);
  const KVCache cache = RunLibrary(c, GetParam());
  const KVCache::KV kv = cache.Reconstruct();
  const Dims qd{1, c.q_heads, 3, c.kd.dim};
  const Floats q = Gaussian(qd.size(), GetParam() + 5);
  EXPECT_LT(RelL2(Attend(cache, q, qd),
                  PlainAttention(q, qd, ToFloats(kv.k), c.kd, ToFloats(kv.v), c.vd)),
            AttentionError(cache));
}

TEST_P(OracleTest, FitsTheSameRanksBitsAndAxes) {
  const Case& c = ExpectedOf(GetParam()).data;
  SCOPED_TRACE(c.config);
  const KVCacheConfig config = KVCacheConfig::Parse(c.config);
  const int64_t first = config.sink_tokens, n = config.fit_tokens - first;
  LayerMoments moments;
  DivideHeads(config, FindMethod("palu"), c.heads, moments);
  for (const HeadRange& range : moments.groups) {
    Moments k(static_cast<int>(c.kd.dim)), v(static_cast<int>(c.vd.dim));
    for (int h = range.first; h < range.last; ++h) {
      const auto head = [&](const Floats& x, const Dims& dims) {
        const auto begin = x.begin() + static_cast<int64_t>(dims.at(0, h, first));
        return RoundedTo(Floats(begin, begin + n * dims.dim), DType::kF16);
      };
      Floats rows = head(c.k, c.kd);
      if (config.key_fit == KeyFit::kAveraged) Unrotate(c.rope, first, rows.data(), n, c.kd.dim);
      k.Add(rows.data(), n, c.kd.dim);
      v.Add(head(c.v, c.vd).data(), n, c.vd.dim);
    }
    if (config.key_mean == KeyMean::kRotated) {
      const std::vector<double> mean = k.Centre();
      moments.k_means.push_back({RotatedMean(c.rope, {mean.begin(), mean.end()})});
    }
    if (config.key_fit == KeyFit::kAveraged) k = AverageOverPositions(k, c.rope, c.context);
    moments.k.push_back(k);
    moments.v.push_back(v);
  }
  const auto codec =
      FitLayer(config, FindMethod("palu"), static_cast<int>(c.kd.dim), static_cast<int>(c.vd.dim),
               EqualBits(config, static_cast<int>(c.kd.dim), static_cast<int>(c.vd.dim)), moments,
               std::make_shared<MemoryAccount>(0));
  const OracleLayer& expected = ExpectedOf(GetParam()).layer;
  for (const auto& [side, want] :
       {std::pair{&codec->k, &expected.k}, std::pair{&codec->v, &expected.v}}) {
    ASSERT_EQ(side->groups.size(), want->bases.size());
    for (size_t g = 0; g < want->bases.size(); ++g) {
      const GroupCodec& group = side->groups[g];
      const oracle::Basis& basis = want->bases[g];
      EXPECT_EQ(std::vector<int>(group.plan.bits.begin(), group.plan.bits.end()), basis.bits);
      // Where the mean turns, a late position tells the angles too.
      const int64_t position = 3000;
      Floats mean = group.mean;
      if (!group.rotated_means.empty()) {
        mean.assign(group.dim, 0.0f);
        group.rotated_means[0].Add(position, 1, 1.0f, mean.data(), group.dim);
      }
      EXPECT_EQ(group.rotated_means.empty(), basis.rope.inv_freq.empty());
      EXPECT_LT(MaxAbs(mean, oracle::Rotate(basis.rope, position, basis.mu)), 1e-5);
      // Both projectors V V^T: they do not depend on signs or on turns among equal eigenvalues.
      const int d = group.dim, r = group.rank();
      ASSERT_EQ(r, static_cast<int>(basis.bits.size()));
      double error = 0;
      for (int i = 0; i < d; ++i) {
        for (int j = 0; j < d; ++j) {
          double difference = 0;
          for (int a = 0; a < r; ++a) {
            difference += static_cast<double>(F16ToF32(group.basis[a * d + i])) *
                          F16ToF32(group.basis[a * d + j]);
            difference -= basis.v[i * r + a] * basis.v[j * r + a];
          }
          error += difference * difference;
        }
      }
      EXPECT_LT(std::sqrt(error / r), 2e-3);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(RandomShapes, OracleTest, testing::Range(1, 17));

TEST(OracleDistortionTest, TablesAgree) {
  for (const ScaleFormat scales : {ScaleFormat::kMinMax, ScaleFormat::kLog8}) {
    for (const int group_size : {8, 16, 32, 64, 128}) {
      oracle::Options options;
      options.log8 = scales == ScaleFormat::kLog8;
      options.group_size = group_size;
      for (int bits = 0; bits <= 8; ++bits) {
        const double measured = oracle::Distortion(options, bits);
        EXPECT_NEAR(Distortion(scales, group_size, bits), measured, 0.03 * measured)
            << group_size << " tokens, " << bits << " bits";
      }
    }
  }
}

TEST(OraclePageTest, SameLatentsGiveTheSamePage) {
  Random random(3);
  int64_t bytes = 0, different = 0;
  for (const char* scales : {"log8", "minmax"}) {
    for (const int group_size : {8, 16, 32, 64, 128}) {
      const bool values = group_size % 3 == 1;  // 16 and 64
      std::vector<uint8_t> bits(24);
      for (uint8_t& b : bits) b = static_cast<uint8_t>(random.Between(1, 8));
      const KVCacheConfig config = KVCacheConfig::Parse(
          "palu:scales=" + std::string(scales) + ",group_size=" + std::to_string(group_size));
      const PagePlan plan = PagePlan::Make(bits, config.scales, group_size, 0,
                                           values ? CodeOrder::kForSums : CodeOrder::kForScores);
      const oracle::Options options = ToOptions(config, 64, 0);
      const int tokens = plan.page_tokens;
      Floats x = Gaussian(bits.size() * tokens, 5 + group_size);
      for (size_t c = 0; c < bits.size(); ++c) {
        for (int t = 0; t < tokens; ++t)
          x[c * tokens + t] *= static_cast<float>(std::exp2(8.0 - static_cast<double>(c)));
      }
      const oracle::Vec latents(x.begin(), x.end());
      const oracle::Page want =
          oracle::EncodePage(latents, {bits.begin(), bits.end()}, options, values);
      std::vector<uint8_t> flat = want.codes;
      for (const auto* part : {&want.scales, &want.zeros}) {
        for (const uint16_t s : *part) {
          flat.push_back(s & 255);
          if (!options.log8) flat.push_back(s >> 8);
        }
      }
      std::vector<uint8_t> page(plan.page_bytes());
      Reference().encode_page(plan, x.data(), tokens, page.data());
      ASSERT_EQ(page.size(), flat.size());
      ASSERT_EQ(static_cast<int64_t>(page.size()), oracle::PageBytes(want, options));
      for (size_t i = 0; i < page.size(); ++i) different += page[i] != flat[i];
      bytes += static_cast<int64_t>(page.size());

      // The oracle's page, decoded by the library.
      Floats decoded(bits.size() * tokens), block(bits.size() * kBlockTokens);
      for (int b = 0; b < plan.blocks(); ++b) {
        Reference().decode_block(plan, flat.data(), b, block.data());
        for (size_t c = 0; c < bits.size(); ++c) {
          std::copy_n(&block[c * kBlockTokens], kBlockTokens,
                      &decoded[c * tokens + b * kBlockTokens]);
        }
      }
      EXPECT_LT(
          RelL2(decoded, oracle::DecodePage(want, {bits.begin(), bits.end()}, options, values)),
          1e-6);
    }
  }
  // f32 and double may round a scale or a code on a border differently.
  EXPECT_LE(different, bytes / 1000);
}

TEST(OracleReferenceTest, ReferencePresetAgrees) {
  Case c = MakeCase(40);
  c.config = "palu:reference";
  const oracle::Options options =
      ToOptions(KVCacheConfig::Parse(c.config), static_cast<int>(c.kd.dim), 0);
  const OracleLayer expected = RunOracle(c, options);
  KVCache cache = MakeCache(c.config, c.heads, static_cast<int>(c.kd.dim),
                            {.dim_v = static_cast<int>(c.vd.dim)});
  const KVCache::KV kv = cache.UpdateAndFetch(Whole(c.k, c.kd), Whole(c.v, c.vd));
  ExpectSameCodes(ToFloats(kv.k), oracle::Decode(expected.k, options), c.k, 0.1);
  ExpectSameCodes(ToFloats(kv.v), oracle::Decode(expected.v, options), c.v, 0.1);
  EXPECT_GT(cache.Stats().encoded_tokens, 0);
}

}  // namespace
}  // namespace palu
