// KVCache: shapes, dtypes, options and attention. State (trim, fork, windows) is in
// cache_state_test.cc, bad input in cache_errors_test.cc.
#include "test_util.h"

namespace palu {
namespace {

using namespace test;

// A layer and a config that encodes most of its tokens.
struct Shape {
  std::string name, config;
  int batch, heads, q_heads, dim_k, dim_v;
  int64_t tokens;
};

void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

struct Filled {
  Dims kd, vd;
  Floats k, v;
  RopeParams rope;
  KVCache cache;
};

Filled Fill(const Shape& s, uint64_t seed = 1, int64_t chunk = 97) {
  const Dims kd{s.batch, s.heads, s.tokens, s.dim_k}, vd{s.batch, s.heads, s.tokens, s.dim_v};
  const RopeParams rope = Rope(s.dim_k / 2 * 2);
  Filled f{kd,
           vd,
           RopedKeys(kd, rope, seed),
           Planted(vd, Decay(s.dim_v, 1, 0.93), 0, seed + 1, 1, 0.3),
           rope,
           MakeCache(s.config, s.heads, s.dim_k, {.dim_v = s.dim_v, .batch = s.batch})};
  for (int64_t at = 0; at < s.tokens; at += chunk) {
    Feed(f.cache, f.k, kd, f.v, vd, at, std::min(chunk, s.tokens - at), &f.rope);
  }
  return f;
}

const char kQuick[] = "palu:fit_tokens=96,recent_tokens=20";

class CacheShapes : public testing::TestWithParam<Shape> {};

TEST_P(CacheShapes, ReconstructIsCloseAndExactWhereItHasToBe) {
  const Shape& s = GetParam();
  const Filled f = Fill(s);
  const CacheStats stats = f.cache.Stats();
  const KVCacheConfig& config = f.cache.config();
  EXPECT_EQ(f.cache.size(), s.tokens);
  EXPECT_EQ(stats.tokens, s.tokens);
  EXPECT_EQ(stats.encoded_tokens + stats.exact_tokens, s.tokens);
  const int64_t page = std::max(32, config.group_size);
  EXPECT_EQ(stats.encoded_tokens,
            (s.tokens - config.sink_tokens - config.recent_tokens) / page * page);

  const KVCache::KV kv = f.cache.Reconstruct();
  EXPECT_EQ(kv.k.shape, f.kd.shape());
  EXPECT_EQ(kv.v.shape, f.vd.shape());
  const Floats k = ToFloats(kv.k), v = ToFloats(kv.v);
  EXPECT_LT(RelL2(k, f.k), 0.45);
  EXPECT_LT(RelL2(v, f.v), 0.45);
  EXPECT_GT(RelL2(k, f.k), 1e-4);
  // Sinks and what follows the pages are the input in fp16.
  const int64_t after = config.sink_tokens + stats.encoded_tokens;
  for (const auto& [first, n] :
       {std::pair<int64_t, int64_t>{0, config.sink_tokens}, {after, s.tokens - after}}) {
    EXPECT_EQ(CopySlice(k, f.kd, first, n), RoundedTo(CopySlice(f.k, f.kd, first, n), DType::kF16));
    EXPECT_EQ(CopySlice(v, f.vd, first, n), RoundedTo(CopySlice(f.v, f.vd, first, n), DType::kF16));
  }
}

TEST_P(CacheShapes, AttendSeesWhatReconstructGives) {
  const Shape& s = GetParam();
  const Filled f = Fill(s);
  const KVCache::KV kv = f.cache.Reconstruct();
  const Floats k = ToFloats(kv.k), v = ToFloats(kv.v);
  // One token, a few (both below and above what one pass takes), and a long chunk.
  for (const int64_t n : {1, 2, 7, 65, 130}) {
    const Dims qd{s.batch, s.q_heads, n, s.dim_k};
    const Floats q = Gaussian(qd.size(), 100 + n);
    EXPECT_LT(RelL2(Attend(f.cache, q, qd), PlainAttention(q, qd, k, f.kd, v, f.vd)),
              AttentionError(f.cache))
        << n << " queries";
  }
}

INSTANTIATE_TEST_SUITE_P(
    Table, CacheShapes,
    testing::Values(
        Shape{"plain", kQuick, 1, 4, 4, 64, 64, 300},
        Shape{"one_kv_head", kQuick, 1, 1, 8, 64, 64, 300},
        Shape{"gqa", kQuick, 1, 2, 6, 64, 64, 301}, Shape{"batch", kQuick, 3, 2, 4, 64, 64, 280},
        Shape{"dims_differ", kQuick, 1, 2, 2, 96, 64, 299},
        Shape{"wide_v", kQuick, 1, 2, 4, 40, 80, 263}, Shape{"d80", kQuick, 1, 2, 2, 80, 80, 250},
        Shape{"d96", kQuick, 1, 2, 2, 96, 96, 250}, Shape{"d128", kQuick, 1, 2, 2, 128, 128, 250},
        Shape{"d256", "palu:fit_tokens=160,recent_tokens=20,bits=auto:4", 1, 1, 2, 256, 256, 290},
        Shape{"odd_dim", "palu:fit_tokens=96,recent_tokens=20,bits=auto:4", 1, 2, 2, 33, 17, 200},
        Shape{"uneven_groups", "palu:fit_tokens=96,recent_tokens=20,n_head_groups=3", 1, 7, 7, 64,
              64, 250},
        Shape{"many_groups", "palu:fit_tokens=96,recent_tokens=20,n_head_groups=50", 1, 3, 3, 64,
              64, 250},
        Shape{"group8", "palu:fit_tokens=96,recent_tokens=9,group_size=8", 1, 2, 2, 64, 64, 250},
        Shape{"group16", "palu:fit_tokens=96,recent_tokens=9,group_size=16", 1, 2, 2, 64, 64, 250},
        Shape{"group64", "palu:fit_tokens=96,recent_tokens=9,group_size=64", 1, 2, 2, 64, 64, 281},
        Shape{"group128", "palu:fit_tokens=96,recent_tokens=9,group_size=128", 1, 2, 2, 64, 64,
              300},
        Shape{"minmax", "palu:fit_tokens=96,recent_tokens=20,scales=minmax,bits=auto:4", 1, 2, 2,
              64, 64, 250},
        Shape{"fp16_values", "palu:fit_tokens=96,recent_tokens=20,quantize_values=false", 1, 2, 2,
              64, 64, 250},
        Shape{"fp16_values_group128",
              "palu:fit_tokens=96,recent_tokens=20,quantize_values=false,group_size=128", 1, 2, 2,
              64, 64, 300},
        Shape{"explicit_rank", "palu:fit_tokens=96,recent_tokens=20,rank=48,bits=auto:4", 1, 2, 2,
              64, 64, 250},
        Shape{"mixed", "palu:fit_tokens=96,recent_tokens=20,hi_bit=6,lo_bit=4", 1, 2, 2, 64, 64,
              250},
        Shape{"no_exact_tokens", "palu:fit_tokens=96,sink_tokens=0,recent_tokens=0", 1, 2, 2, 64,
              64, 256},
        Shape{"odd_sinks", "palu:fit_tokens=96,sink_tokens=37,recent_tokens=1", 1, 2, 2, 64, 64,
              256},
        Shape{"no_basis", "palu:fit_tokens=96,recent_tokens=20,basis=none", 1, 2, 4, 80, 64, 250},
        Shape{"hadamard", "palu:fit_tokens=96,recent_tokens=20,basis=hadamard", 1, 2, 4, 80, 64,
              250},
        Shape{"rotated_mean", "palu:fit_tokens=96,recent_tokens=20,key_mean=rotated", 1, 2, 6, 64,
              64, 301},
        Shape{"rotated_mean_odd_dim",
              "palu:fit_tokens=96,recent_tokens=20,key_mean=rotated,group_size=64", 2, 2, 2, 33, 17,
              250},
        Shape{"joint_pairs", "palu:fit_tokens=200,recent_tokens=20,joint_heads=2", 1, 4, 8, 32, 32,
              301},
        Shape{"joint_all_uneven",
              "palu:fit_tokens=200,recent_tokens=20,joint_heads=2,key_mean=rotated", 2, 3, 6, 32,
              48, 301},
        Shape{"joint_all_group64",
              "palu:fit_tokens=250,recent_tokens=20,joint_heads=9,key_mean=rotated,group_size=64",
              1, 3, 9, 64, 64, 350},
        Shape{"joint_uneven_max",
              "palu:fit_tokens=200,recent_tokens=20,joint_heads=2,rank_policy=max", 1, 3, 6, 32, 32,
              301},
        Shape{"joint_no_basis",
              "palu:fit_tokens=96,recent_tokens=20,joint_heads=2,basis=none,key_mean=rotated", 1, 4,
              4, 32, 16, 250},
        Shape{"equal_bits", "palu:fit_tokens=96,recent_tokens=20,bits=4", 1, 2, 4, 64, 64, 250},
        Shape{"uniform", "uniform:bits=4", 1, 2, 4, 64, 96, 250},
        Shape{"uniform_group8", "uniform:bits=3,group_size=8,recent_tokens=9", 2, 1, 4, 33, 64,
              250},
        Shape{"kivi", "kivi:bits=4", 2, 2, 4, 64, 64, 300},
        Shape{"kivi_d80_group128", "kivi:bits=3,group_size=128,sink_tokens=4", 1, 2, 4, 80, 80,
              300},
        Shape{"svdq", "svdq:bits=4,fit_tokens=250,energy_threshold=1,recent_tokens=20", 1, 3, 6, 64,
              40, 300},
        Shape{"svdq_d256", "svdq:bits=4,fit_tokens=550,energy_threshold=1,recent_tokens=20", 1, 1,
              2, 256, 256, 600},
        Shape{"q8_0", "q8_0", 1, 2, 4, 64, 80, 250},
        Shape{"q8_0_q4_0", "q8_0/q4_0:recent_tokens=20,sink_tokens=4", 2, 2, 4, 64, 64, 250},
        Shape{"q4_0", "q4_0", 1, 1, 2, 128, 33, 250},
        Shape{"rabitq", "rabitq:bits=3", 1, 2, 4, 64, 64, 250},
        Shape{"rabitq_d80", "rabitq:bits=4,recent_tokens=20", 2, 2, 4, 80, 40, 250}),
    testing::PrintToStringParamName());

// ---- dtypes and layouts ----

TEST(CacheDTypes, InputsAndOutputsOfEveryDType) {
  const Dims dims{1, 2, 200, 64};
  const RopeParams rope = Rope(64);
  const Floats k = RopedKeys(dims, rope, 3), v = Gaussian(dims.size(), 4);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(DTypeName(dtype));
    const OwnedTensor kt = ToTensor(k, dims, dtype), vt = ToTensor(v, dims, dtype);
    KVCache cache = MakeCache(kQuick, 2, 64);
    const KVCache::KV kv =
        cache.UpdateAndFetch(kt.view(), vt.view(), {.position = -1, .rope = &rope});
    EXPECT_EQ(kv.k.dtype, dtype);
    EXPECT_EQ(kv.v.dtype, dtype);
    EXPECT_EQ(kv.k.shape, dims.shape());
    // The same as feeding the rounded numbers as f32.
    KVCache same = MakeCache(kQuick, 2, 64);
    const Floats k_rounded = ToFloats(kt), v_rounded = ToFloats(vt);
    Feed(same, k_rounded, dims, v_rounded, dims, 0, 200, &rope);
    EXPECT_EQ(Take(cache), Take(same));
    EXPECT_EQ(ToFloats(kv.k), RoundedTo(Take(same).k, dtype));

    const Dims qd{1, 4, 3, 64};
    const OwnedTensor q = ToTensor(Gaussian(qd.size(), 5), qd, dtype);
    OwnedTensor out{std::vector<std::byte>(qd.size() * DTypeBytes(dtype)), dtype, qd.shape()};
    AttendArgs args;
    args.q = q.view();
    cache.Attend(args, MutableTensor::Dense(out.data.data(), dtype, qd.shape()));
    const Floats want = Attend(cache, ToFloats(q), qd);
    EXPECT_LT(MaxAbs(ToFloats(out), RoundedTo(want, dtype)), 1e-6);
  }
}

TEST(CacheDTypes, EnginesRowsNeedNoCopy) {
  // [S, H, D] rows and a padded stride.
  const Dims dims{1, 3, 150, 64};
  const Floats k = Gaussian(dims.size(), 6), v = Gaussian(dims.size(), 7);
  const Floats k_rows = TokenMajor(k, dims), v_rows = TokenMajor(v, dims);
  const std::string config = "palu:fit_tokens=96,recent_tokens=20,key_fit=prompt";
  KVCache dense = MakeCache(config, 3, 64), rows = MakeCache(config, 3, 64),
          padded = MakeCache(config, 3, 64);
  Feed(dense, k, dims, v, dims, 0, 150);
  rows.Append(ConstTensor::Rows(k_rows.data(), 150, 3, 64),
              ConstTensor::Rows(v_rows.data(), 150, 3, 64));
  rows.Seal();
  EXPECT_EQ(Take(rows), Take(dense));

  Floats wide(150 * 3 * 80, std::nanf(""));
  for (size_t i = 0; i < k_rows.size(); ++i) wide[i / 64 * 80 + i % 64] = k_rows[i];
  ConstTensor view = ConstTensor::Rows(wide.data(), 150, 3, 64);
  view.stride = {0, 80, 240, 1};
  padded.Append(view, ConstTensor::Rows(v_rows.data(), 150, 3, 64));
  padded.Seal();
  EXPECT_EQ(Take(padded), Take(dense));

  const Dims qd{1, 6, 4, 64};
  const Floats q = Gaussian(qd.size(), 8), q_rows = TokenMajor(q, qd);
  Floats out(qd.size());
  AttendArgs args;
  args.q = ConstTensor::Rows(q_rows.data(), 4, 6, 64);
  dense.Attend(args, MutableTensor::Rows(out.data(), 4, 6, 64));
  EXPECT_EQ(out, TokenMajor(Attend(dense, q, qd), qd));
}

TEST(CacheDTypes, BatchElementsAreIndependent) {
  const Shape both{"", kQuick, 2, 2, 4, 64, 64, 200}, one{"", kQuick, 1, 2, 4, 64, 64, 200};
  const Filled f = Fill(both);
  const Floats k = ToFloats(f.cache.Reconstruct().k);
  for (int64_t b = 0; b < 2; ++b) {
    const size_t half = f.k.size() / 2;
    const Floats kb(f.k.begin() + b * half, f.k.begin() + (b + 1) * half);
    const Floats vb(f.v.begin() + b * half, f.v.begin() + (b + 1) * half);
    KVCache single = MakeCache(kQuick, 2, 64);
    const Dims dims{1, 2, 200, 64};
    Feed(single, kb, dims, vb, dims, 0, 200, &f.rope);
    EXPECT_EQ(ToFloats(single.Reconstruct().k),
              Floats(k.begin() + b * half, k.begin() + (b + 1) * half));
  }
}

// ---- options of Attend ----

class AttendOptionsTest : public testing::TestWithParam<std::string> {
 protected:
  AttendOptionsTest()
      : f_(Fill({"", GetParam(), 1, 2, 4, 64, 64, 230})),
        k_(ToFloats(f_.cache.Reconstruct().k)),
        v_(ToFloats(f_.cache.Reconstruct().v)) {}

  // Both paths: few queries go straight over pages, many by tiles.
  void Check(const AttendArgs& args, const AttentionOptions& plain, double tolerance = 0) {
    if (tolerance == 0) tolerance = AttentionError(f_.cache);
    for (const int64_t n : {2, 50}) {
      const Dims qd{1, 4, n, 64};
      const Floats q = Gaussian(qd.size(), 9);
      const Floats got = Attend(f_.cache, q, qd, args);
      EXPECT_TRUE(AllFinite(got));
      EXPECT_LT(RelL2(got, PlainAttention(q, qd, k_, f_.kd, v_, f_.vd, plain)), tolerance)
          << n << " queries";
    }
  }

  Filled f_;
  Floats k_, v_;
};

TEST_P(AttendOptionsTest, Scale) {
  AttendArgs args;
  args.scale = 0.31f;
  Check(args, {.scale = 0.31f});
}

TEST_P(AttendOptionsTest, SoftCap) {
  AttendArgs args;
  args.soft_cap = 3;
  args.scale = 0.5f;
  Check(args, {.scale = 0.5, .soft_cap = 3});
}

TEST_P(AttendOptionsTest, SinkLogits) {
  for (const float top : {-50.0f, 0.0f, 6.0f, 60.0f}) {
    const Floats sinks = {top, top - 1, top + 1, -INFINITY};
    AttendArgs args;
    args.sinks = sinks.data();
    Check(args, {.sinks = sinks.data()});
  }
}

TEST_P(AttendOptionsTest, MaskWithAndWithoutStride) {
  Random random(10);
  const int64_t stride = 250;
  Floats padded(50 * stride, std::nanf("")), dense(50 * 230);
  for (int64_t i = 0; i < 50; ++i) {
    for (int64_t t = 0; t < 230; ++t) {
      const float m =
          t > 0 && random.Uniform() < 0.3 ? -INFINITY : static_cast<float>(random.Normal());
      padded[i * stride + t] = dense[i * 230 + t] = m;
    }
  }
  for (const bool causal : {true, false}) {
    AttendArgs args;
    args.causal = causal;
    args.mask = dense.data();
    Check(args, {.mask = dense.data(), .causal = causal});
    args.mask = padded.data();
    args.mask_stride = stride;
    Check(args, {.mask = dense.data(), .causal = causal});
  }
}

TEST_P(AttendOptionsTest, MaskThatHidesWholePages) {
  Floats mask(50 * 230, -INFINITY);
  for (int64_t i = 0; i < 50; ++i) mask[i * 230 + 70] = mask[i * 230 + 71] = 0;
  AttendArgs args;
  args.mask = mask.data();
  args.causal = false;
  Check(args, {.mask = mask.data(), .causal = false});
}

TEST_P(AttendOptionsTest, AQueryThatSeesNothingGetsZeros) {
  const Floats mask(50 * 230, -INFINITY);
  AttendArgs args;
  args.mask = mask.data();
  for (const int64_t n : {2, 50}) {
    const Dims qd{1, 4, n, 64};
    EXPECT_EQ(Attend(f_.cache, Gaussian(qd.size(), 9), qd, args), Floats(qd.size(), 0.0f));
  }
}

TEST_P(AttendOptionsTest, WithoutCausality) {
  AttendArgs args;
  args.causal = false;
  Check(args, {.causal = false});
}

TEST_P(AttendOptionsTest, LargeLogitsDoNotOverflow) {
  AttendArgs args;
  args.scale = 300;
  // The winner takes all; f32 scores of thousands carry about four digits.
  Check(args, {.scale = 300}, 2e-2);
}

INSTANTIATE_TEST_SUITE_P(
    Methods, AttendOptionsTest,
    testing::Values(kQuick, "palu:fit_tokens=96,recent_tokens=20,quantize_values=false", "fp16",
                    "fp32"),
    [](const auto& info) { return "config" + std::to_string(info.index); });

// ---- exact methods and edges ----

TEST(CacheExact, Fp16AndFp32KeepTheirBits) {
  const Dims dims{2, 3, 77, 48};
  const Floats k = Gaussian(dims.size(), 11), v = Gaussian(dims.size(), 12);
  for (const auto& [config, dtype] :
       {std::pair{"fp16", DType::kF16}, std::pair{"fp32", DType::kF32}}) {
    KVCache cache = MakeCache(config, 3, 48, {.batch = 2});
    for (int64_t at = 0; at < 77; at += 11) Feed(cache, k, dims, v, dims, at, 11);
    EXPECT_EQ(ToFloats(cache.Reconstruct().k), RoundedTo(k, dtype));
    EXPECT_EQ(ToFloats(cache.Reconstruct().v), RoundedTo(v, dtype));
    const CacheStats stats = cache.Stats();
    EXPECT_EQ(stats.encoded_tokens, 0);
    EXPECT_EQ(stats.rank_k, 0);
    EXPECT_EQ(stats.assigned_avg_bits, dtype == DType::kF16 ? 16 : 32);
    EXPECT_GE(stats.stored_bits_per_element, stats.assigned_avg_bits);
  }
}

TEST(CacheExact, EveryTokenIsExactUntilTheFit) {
  const Dims dims{1, 2, 600, 64};
  const RopeParams rope = Rope(64);
  const Floats k = RopedKeys(dims, rope, 13), v = Gaussian(dims.size(), 14);
  KVCache cache = MakeCache("palu", 2, 64);    // fits on 8 * 64 tokens
  Feed(cache, k, dims, v, dims, 0, 1, &rope);  // a prompt of one token
  EXPECT_EQ(cache.size(), 1);
  EXPECT_EQ(cache.Stats().rank_k, 0);
  for (int64_t at = 1; at < 511; at += 51) Feed(cache, k, dims, v, dims, at, 51, &rope);
  ASSERT_EQ(cache.size(), 511);
  EXPECT_EQ(cache.Stats().encoded_tokens, 0);
  const Dims so_far{1, 2, 511, 64};
  EXPECT_EQ(ToFloats(cache.Reconstruct().k), RoundedTo(CopySlice(k, dims, 0, 511), DType::kF16));
  EXPECT_EQ(ToFloats(cache.Reconstruct().v), RoundedTo(CopySlice(v, dims, 0, 511), DType::kF16));
  Feed(cache, k, dims, v, dims, 511, 1, &rope);
  EXPECT_EQ(cache.Stats().encoded_tokens, (512 - 4 - 64) / 32 * 32);
  EXPECT_EQ(cache.Stats().rank_k, 64);
  EXPECT_EQ(so_far.tokens + 1, cache.size());
}

TEST(CacheExact, OneTokenWaitsWhenTheFirstAppendFits) {
  // fit_tokens=0: one token has no spread, so it waits; the fit comes with the second call.
  const Dims dims{1, 2, 65, 64};
  const Floats k = Gaussian(dims.size(), 15), v = Gaussian(dims.size(), 16);
  KVCache cache = MakeCache("palu:reference,rank=8", 2, 64);
  Feed(cache, k, dims, v, dims, 0, 1);
  EXPECT_EQ(cache.Stats().rank_k, 0);
  Feed(cache, k, dims, v, dims, 1, 64);
  EXPECT_EQ(cache.Stats().rank_k, 8);
  EXPECT_EQ(cache.Stats().encoded_tokens, 64);
}

TEST(CacheExact, ConstantAndZeroTensors) {
  const Dims dims{1, 2, 200, 64};
  const RopeParams none;
  for (const std::string config :
       {"palu:fit_tokens=96,recent_tokens=20", "palu:reference", "palu:fit_tokens=96,scales=minmax",
        "palu:fit_tokens=96,quantize_values=false"}) {
    for (const float value : {0.0f, 1.5f, -3e4f}) {
      SCOPED_TRACE(config + " " + std::to_string(value));
      const Floats x(dims.size(), value);
      KVCache cache = MakeCache(config, 2, 64);
      Feed(cache, x, dims, x, dims, 0, 200, &none);
      EXPECT_GT(cache.Stats().encoded_tokens, 0);
      // A constant is its own mean; the smallest log8 scale is 2^-16.
      EXPECT_LT(MaxAbs(ToFloats(cache.Reconstruct().k), x), 1e-3 * std::abs(value) + 2e-5);
      EXPECT_LT(MaxAbs(ToFloats(cache.Reconstruct().v), x), 1e-3 * std::abs(value) + 2e-5);
      const Dims qd{1, 2, 1, 64};
      AttendArgs args;
      args.scale = 1e-6f;
      const Floats out = Attend(cache, Floats(qd.size(), 0.1f), qd, args);
      EXPECT_LT(MaxAbs(out, Floats(qd.size(), value)), 1e-3 * std::abs(value) + 2e-5);
    }
  }
}

TEST(CacheExact, ValuesAtTheEdgeOfFp16StayFinite) {
  const Dims dims{1, 2, 200, 64};
  Random random(17);
  Floats x(dims.size());
  for (float& v : x) v = random.Uniform() < 0.5 ? 65504.0f : -65504.0f;
  const RopeParams none;
  for (const std::string config :
       {"palu:fit_tokens=96,recent_tokens=20",
        "palu:fit_tokens=96,recent_tokens=20,quantize_values=false", "palu:reference"}) {
    KVCache cache = MakeCache(config, 2, 64);
    Feed(cache, x, dims, x, dims, 0, 200, &none);
    EXPECT_GT(cache.Stats().encoded_tokens, 0);
    EXPECT_TRUE(AllFinite(ToFloats(cache.Reconstruct().k))) << config;
    EXPECT_TRUE(AllFinite(ToFloats(cache.Reconstruct().v))) << config;
  }
}

// ---- integers of 16 and of 8 bits ----

// Relative L2 distance of attention to float64 on the same codes; scales from flat to peaked
// softmax.
double AttentionDistance(const std::string& config, float scale) {
  const Filled f = Fill({"", config, 1, 2, 6, 64, 64, 1500});
  const KVCache::KV kv = f.cache.Reconstruct();
  const Dims qd{1, 6, 1, 64};
  const Floats q = Gaussian(qd.size(), 31);
  AttendArgs args;
  args.scale = scale;
  return RelL2(Attend(f.cache, q, qd, args),
               PlainAttention(q, qd, ToFloats(kv.k), f.kd, ToFloats(kv.v), f.vd, {.scale = scale}));
}

TEST(Integers, Of16BitsAreWithinTheStatedError) {
  for (const char* config : {"palu", "palu:small", "palu:quality", "palu:rank=32,hi_bit=4"}) {
    for (const float scale : {0.01f, 0.125f, 1.0f, 4.0f}) {
      EXPECT_LT(AttentionDistance(config, scale), 3e-4) << config << " scale " << scale;
    }
  }
}

TEST(Integers, Of8BitsAreWithinTheStatedErrorOrRefused) {
  if (KernelTarget() != "AVX3_DL") {
    ExpectSays(MessageOf<ConfigError>([] { KVCacheConfig::Parse("palu:fast=true"); }),
               {"fast=true", "products of four bytes"});
    return;
  }
  const std::pair<float, double> bounds[] = {{0.01f, 2e-4}, {0.125f, 1e-3}, {1.0f, 0.02}};
  for (const char* config : {"palu", "palu:small", "palu:rank=32,hi_bit=4"}) {
    for (const auto& [scale, bound] : bounds) {
      const double error = AttentionDistance(
          std::string(config) + (std::string(config) == "palu" ? ":fast=true" : ",fast=true"),
          scale);
      EXPECT_LT(error, bound) << config << " scale " << scale;
      EXPECT_GT(error, 2e-5) << config << " scale " << scale;  // it is another form
    }
  }
}

TEST(CacheExact, TinyHeadDims) {
  for (const int dim : {1, 2, 3}) {
    const Dims dims{1, 2, 150, dim};
    const Floats k = Gaussian(dims.size(), 18), v = Gaussian(dims.size(), 19);
    KVCache cache =
        MakeCache("palu:fit_tokens=64,recent_tokens=4,key_fit=prompt,bits=auto:8", 2, dim);
    Feed(cache, k, dims, v, dims, 0, 150);
    EXPECT_GT(cache.Stats().encoded_tokens, 0);
    EXPECT_LT(RelL2(ToFloats(cache.Reconstruct().k), k), 0.05);
    const Dims qd{1, 2, 1, dim};
    const KVCache::KV kv = cache.Reconstruct();
    const Floats q = Gaussian(qd.size(), 20);
    EXPECT_LT(RelL2(Attend(cache, q, qd),
                    PlainAttention(q, qd, ToFloats(kv.k), dims, ToFloats(kv.v), dims)),
              AttentionError(cache));
  }
}

}  // namespace
}  // namespace palu
