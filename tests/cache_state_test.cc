// What a KVCache keeps: chunks, positions, trim, fork, clear, statistics. Sliding windows are in
// cache_window_test.cc.
#include "cache_data.h"

namespace palu {
namespace {

using namespace test;

KVCache Fed(const std::string& config, const Data& d, const LayerOptions& o = {}) {
  KVCache cache = MakeCache(config, kHeads, kDim, o);
  Feed(cache, d, 0, d.dims.tokens);
  return cache;
}

// Two caches hold the same tokens and, from them, the same bits.
void ExpectSameContent(const KVCache& a, const KVCache& b) {
  const Snapshot x = Take(a), y = Take(b);
  EXPECT_EQ(x.size, y.size);
  EXPECT_EQ(x.encoded, y.encoded);
  EXPECT_EQ(x.code_bytes, y.code_bytes);
  EXPECT_EQ(x.scale_bytes, y.scale_bytes);
  EXPECT_TRUE(x.k == y.k);
  EXPECT_TRUE(x.v == y.v);
}

// ---- chunks and positions ----

TEST(CacheChunks, BytesDoNotDependOnHowTokensCame) {
  const Data d = MakeData(333, 1, 2);
  for (const std::string config :
       {"palu:fit_tokens=96,recent_tokens=20", "palu:fit_tokens=200,group_size=128", "fp16",
        "palu:fit_tokens=96,scales=minmax,quantize_values=false,recent_tokens=0,sink_tokens=0",
        "palu:fit_tokens=96,recent_tokens=20,key_mean=rotated",
        "palu:fit_tokens=150,recent_tokens=20,joint_heads=2", "kivi", "uniform:bits=3",
        "svdq:fit_tokens=96", "rabitq:fit_tokens=96,recent_tokens=20"}) {
    SCOPED_TRACE(config);
    const Snapshot once = Take(Fed(config, d, {.batch = 2}));
    Random random(2);
    for (int round = 0; round < 6; ++round) {
      KVCache cache = MakeCache(config, kHeads, kDim, {.batch = 2});
      for (int64_t at = 0; at < 333;) {
        const int64_t n = std::min<int64_t>(333 - at, random.Between(1, round == 0 ? 1 : 120));
        // Seal may be left to the next append.
        cache.Append(Slice(d.k, d.dims, at, n), Slice(d.v, d.dims, at, n),
                     {.position = at, .rope = &d.rope});
        if (random.Uniform() < 0.5) cache.Seal();
        at += n;
      }
      cache.Seal();
      EXPECT_EQ(Take(cache), once);
    }
  }
}

TEST(CacheChunks, AChunkSeesItselfExactlyUntilSeal) {
  const Data d = MakeData(400, 3);
  KVCache cache = MakeCache(kQuick, kHeads, kDim);
  Feed(cache, d, 0, 200);
  const int64_t encoded = cache.Stats().encoded_tokens;
  cache.Append(Slice(d.k, d.dims, 200, 200), Slice(d.v, d.dims, 200, 200),
               {.position = -1, .rope = &d.rope});
  EXPECT_EQ(cache.size(), 400);
  EXPECT_EQ(cache.Stats().encoded_tokens, encoded);
  EXPECT_EQ(CopySlice(ToFloats(cache.Reconstruct().k), d.dims, 200, 200),
            RoundedTo(CopySlice(d.k, d.dims, 200, 200), DType::kF16));
  cache.Seal();
  EXPECT_EQ(cache.Stats().encoded_tokens, (400 - 4 - 20) / 32 * 32);
  cache.Seal();  // nothing is left to do
  EXPECT_EQ(Take(cache), Take(Fed(kQuick, d)));
}

TEST(CacheChunks, UpdateAndFetchIsAppendSealReconstruct) {
  const Data d = MakeData(200, 4);
  KVCache cache = MakeCache(kQuick, kHeads, kDim);
  for (int64_t at = 0; at < 200; at += 50) {
    const KVCache::KV kv = cache.UpdateAndFetch(
        Slice(d.k, d.dims, at, 50), Slice(d.v, d.dims, at, 50), {.position = at, .rope = &d.rope});
    EXPECT_EQ(kv.k.shape, Of(at + 50).shape());
    EXPECT_EQ(ToFloats(kv.k), ToFloats(cache.Reconstruct().k));
    EXPECT_EQ(ToFloats(kv.v), ToFloats(cache.Reconstruct().v));
  }
  EXPECT_EQ(Take(cache), Take(Fed(kQuick, d)));
}

TEST(CacheChunks, ASequenceMayStartAnywhere) {
  const Data d = MakeData(200, 5);
  KVCache cache = MakeCache(kQuick, kHeads, kDim);
  cache.Append(Slice(d.k, d.dims, 0, 100), Slice(d.v, d.dims, 0, 100),
               {.position = 5000, .rope = &d.rope});
  cache.Append(Slice(d.k, d.dims, 100, 50), Slice(d.v, d.dims, 100, 50),
               {.position = 5100, .rope = &d.rope});
  cache.Append(Slice(d.k, d.dims, 150, 50), Slice(d.v, d.dims, 150, 50),
               {.position = -1, .rope = &d.rope});
  EXPECT_EQ(cache.size(), 200);
}

TEST(CacheChunks, RopeIsNotNeededOnceTheBasisIsThere) {
  const Data d = MakeData(200, 6);
  KVCache cache = MakeCache(kQuick, kHeads, kDim);
  Feed(cache, d, 0, 150);
  test::Feed(cache, d.k, d.dims, d.v, d.dims, 150, 50, nullptr);
  ExpectSameContent(cache, Fed(kQuick, d));
}

// ---- trim ----

class CacheTrim : public testing::TestWithParam<std::string> {};

TEST_P(CacheTrim, AnyNumberOfTokensThenContinues) {
  const Data d = MakeData(240, 7);
  const KVCache full = Fed(GetParam(), d);
  const Floats k_full = ToFloats(full.Reconstruct().k);
  const CacheStats stats = full.Stats();
  const KVCacheConfig& config = full.config();
  const int64_t page = std::max(32, config.group_size);
  for (const int64_t n :
       {0, 1, 5, 19, 20, 21, 40, 53, 64, 100, 117, 200, 235, 236, 238, 239, 240}) {
    SCOPED_TRACE(n);
    KVCache cache = full.Fork();
    const int64_t left = 240 - n;
    cache.Trim(n);
    ASSERT_EQ(cache.size(), left);
    EXPECT_EQ(cache.Stats().basis_bytes, stats.basis_bytes);
    EXPECT_EQ(cache.Stats().rank_k, stats.rank_k);
    const int64_t in_pages =
        std::min(stats.encoded_tokens, std::max<int64_t>(0, left - config.sink_tokens));
    EXPECT_EQ(cache.Stats().encoded_tokens, stats.encoded_tokens == 0 ? 0 : in_pages / page * page);
    if (left > 0) {
      // What is left reads as before; a page that was cut now sits in the window, in fp16.
      const Floats k = ToFloats(cache.Reconstruct().k), want = CopySlice(k_full, d.dims, 0, left);
      EXPECT_LT(RelL2(k, want), 5e-4);
      const int64_t same = std::min(left, config.sink_tokens + cache.Stats().encoded_tokens);
      EXPECT_EQ(CopySlice(k, Of(left), 0, same), CopySlice(want, Of(left), 0, same));
      const Dims qd{1, kHeads, 1, kDim};
      const Floats q = Gaussian(qd.size(), 8), v = ToFloats(cache.Reconstruct().v);
      EXPECT_LT(RelL2(Attend(cache, q, qd), PlainAttention(q, qd, k, Of(left), v, Of(left))),
                AttentionError(cache));
    }
    if (n > 0) Feed(cache, d, left, n);
    ASSERT_EQ(cache.size(), 240);
    EXPECT_EQ(cache.Stats().encoded_tokens, stats.encoded_tokens);
    const Floats again = ToFloats(cache.Reconstruct().k);
    EXPECT_TRUE(AllFinite(again));
    if (stats.encoded_tokens == 0) {
      EXPECT_TRUE(again == k_full);
    } else {
      // A page that was cut is encoded a second time, from what it decoded to.
      EXPECT_LT(RelL2(again, d.k), 1.5 * RelL2(k_full, d.k));
    }
  }
  EXPECT_TRUE(ToFloats(full.Reconstruct().k) == k_full);  // the forks' trims stayed theirs
}

INSTANTIATE_TEST_SUITE_P(
    Methods, CacheTrim,
    testing::Values("palu:fit_tokens=96,recent_tokens=20",
                    "palu:fit_tokens=96,recent_tokens=20,group_size=64",
                    "palu:fit_tokens=96,sink_tokens=0,recent_tokens=0,scales=minmax,bits=auto:4",
                    "palu:fit_tokens=96,recent_tokens=20,quantize_values=false", "fp16",
                    "palu:fit_tokens=1000", "kivi:bits=4,recent_tokens=20", "uniform:bits=4",
                    "palu:fit_tokens=96,recent_tokens=20,key_mean=rotated",
                    "palu:fit_tokens=150,recent_tokens=20,key_mean=rotated,joint_heads=2",
                    "svdq:fit_tokens=96,bits=4", "rabitq:fit_tokens=96,bits=4"),
    [](const auto& info) { return "config" + std::to_string(info.index); });

TEST(CacheTrimMore, BeforeTheFitIsAsIfTheTokensNeverCame) {
  const Data d = MakeData(300, 9), other = MakeData(300, 10);
  KVCache cache = MakeCache(kQuick, kHeads, kDim);
  Feed(cache, d, 0, 50);
  Feed(cache, other, 50, 40);
  cache.Trim(40);
  Feed(cache, d, 50, 250);
  EXPECT_EQ(Take(cache), Take(Fed(kQuick, d)));
}

TEST(CacheTrimMore, TokenByTokenBackAndForth) {
  // Speculative decoding: a few tokens come and go at every step.
  const Data d = MakeData(260, 11), wrong = MakeData(260, 12);
  KVCache cache = MakeCache(kQuick, kHeads, kDim);
  Feed(cache, d, 0, 120);
  for (int64_t t = 120; t < 240; t += 2) {
    Feed(cache, wrong, t, 4);
    cache.Trim(4);
    Feed(cache, d, t, 2);
  }
  // With 20 recent tokens nothing that was trimmed had been encoded.
  KVCache straight = MakeCache(kQuick, kHeads, kDim);
  Feed(straight, d, 0, 240);
  ExpectSameContent(cache, straight);
}

TEST(CacheTrimMore, AllTokensThenAnotherSequence) {
  const Data d = MakeData(240, 13);
  KVCache cache = Fed(kQuick, d);
  cache.Trim(240);
  EXPECT_EQ(cache.size(), 0);
  EXPECT_EQ(cache.Stats().rank_k, 64);
  cache.Append(Slice(d.k, d.dims, 0, 200), Slice(d.v, d.dims, 0, 200),
               {.position = 77, .rope = &d.rope});
  cache.Seal();
  EXPECT_EQ(cache.size(), 200);
  EXPECT_EQ(cache.Stats().encoded_tokens, (200 - 24) / 32 * 32);
}

// ---- fork ----

TEST(CacheFork, SharesPagesThenDiverges) {
  const Data d = MakeData(1000, 14), other = MakeData(1000, 15);
  KVCache a = MakeCache(kQuick, kHeads, kDim);
  Feed(a, d, 0, 800);
  const int64_t alone = KVCacheBuilder::Memory(a).allocated_bytes;
  KVCache b = a.Fork();
  ExpectSameContent(a, b);
  EXPECT_LT(KVCacheBuilder::Memory(a).allocated_bytes, alone + alone / 20);  // tables only
  const Floats before = ToFloats(a.Reconstruct().k);

  Feed(b, other, 800, 200);
  EXPECT_EQ(a.size(), 800);
  EXPECT_TRUE(ToFloats(a.Reconstruct().k) == before);
  Feed(a, d, 800, 200);
  // Far less than two caches: the common pages are there once.
  EXPECT_LT(KVCacheBuilder::Memory(a).allocated_bytes, a.nbytes() + b.nbytes() - alone / 3);
  ExpectSameContent(a, Fed(kQuick, d));
  KVCache straight = MakeCache(kQuick, kHeads, kDim);
  Feed(straight, d, 0, 800);
  Feed(straight, other, 800, 200);
  ExpectSameContent(b, straight);
}

TEST(CacheFork, OutlivesItsOriginAndReturnsItsMemory) {
  const Data d = MakeData(300, 16);
  std::vector<KVCache> keep;
  Snapshot want;
  {
    const KVCache a = Fed(kQuick, d);
    want = Take(a);
    keep.push_back(a.Fork());
    keep.push_back(keep[0].Fork());
  }
  EXPECT_TRUE(Take(keep[0]).k == want.k);
  keep.erase(keep.begin());
  EXPECT_TRUE(Take(keep[0]).k == want.k);
  EXPECT_EQ(KVCacheBuilder::Memory(keep[0]).allocated_bytes, keep[0].nbytes());
  keep[0].Clear();
  EXPECT_EQ(KVCacheBuilder::Memory(keep[0]).allocated_bytes, keep[0].nbytes());
}

TEST(CacheFork, BeforeTheFitEachFitsItsOwn) {
  const Data d = MakeData(300, 17), other = MakeData(300, 18);
  KVCache a = MakeCache(kQuick, kHeads, kDim);
  Feed(a, d, 0, 40);
  KVCache b = a.Fork();
  Feed(a, d, 40, 260);
  Feed(b, other, 40, 260);
  ExpectSameContent(a, Fed(kQuick, d));
  KVCache straight = MakeCache(kQuick, kHeads, kDim);
  Feed(straight, d, 0, 40);
  Feed(straight, other, 40, 260);
  ExpectSameContent(b, straight);
}

// ---- clear and move ----

TEST(CacheClear, LeavesAFreshCache) {
  const Data d = MakeData(300, 19), other = MakeData(300, 20);
  KVCache cache = Fed(kQuick, other);
  const int64_t empty = MakeCache(kQuick, kHeads, kDim).nbytes();
  cache.Clear();
  EXPECT_EQ(cache.size(), 0);
  EXPECT_EQ(cache.nbytes(), empty);
  EXPECT_EQ(cache.Stats().rank_k, 0);
  EXPECT_EQ(KVCacheBuilder::Memory(cache).allocated_bytes, empty);
  Feed(cache, d, 0, 300);
  EXPECT_EQ(Take(cache), Take(Fed(kQuick, d)));
}

TEST(CacheClear, MovedCachesKeepTheirContent) {
  const Data d = MakeData(200, 21);
  KVCache a = Fed(kQuick, d);
  const Snapshot want = Take(a);
  KVCache b = std::move(a);
  EXPECT_EQ(Take(b), want);
  KVCache c = MakeCache("fp16", 1, 8);
  c = std::move(b);
  EXPECT_EQ(Take(c), want);
}

// ---- statistics ----

TEST(CacheStatsTest, SumsAndShares) {
  const Data d = MakeData(500, 28, 2);
  for (const std::string config : {kQuick, "palu:reference", "palu", "fp16", "fp32"}) {
    SCOPED_TRACE(config);
    KVCache cache = MakeCache(config, kHeads, kDim, {.batch = 2});
    EXPECT_EQ(cache.Stats().stored_bits_per_element, 0);
    for (int64_t at = 0; at < 500; at += 125) {
      Feed(cache, d, at, 125);
      const CacheStats s = cache.Stats();
      EXPECT_EQ(s.tokens, at + 125);
      EXPECT_EQ(s.encoded_tokens + s.exact_tokens, s.tokens);
      EXPECT_EQ(s.code_bytes + s.scale_bytes + s.basis_bytes + s.window_bytes + s.slack_bytes +
                    s.table_bytes,
                s.nbytes);
      EXPECT_EQ(s.nbytes, cache.nbytes());
      EXPECT_EQ(s.fp16_bytes, 2 * s.tokens * kHeads * (kDim + kDim) * 2);
      EXPECT_DOUBLE_EQ(s.stored_bits_per_element,
                       s.nbytes * 8.0 / (2.0 * s.tokens * kHeads * 2 * kDim));
      for (const int64_t part : {s.code_bytes, s.scale_bytes, s.basis_bytes, s.window_bytes,
                                 s.slack_bytes, s.table_bytes}) {
        EXPECT_GE(part, 0);
      }
      if (s.encoded_tokens > 0) {
        // code_bits is what the pages hold.
        const double elements = 2.0 * s.encoded_tokens * kHeads * 2 * kDim;
        EXPECT_NEAR(s.code_bits, (s.code_bytes + s.scale_bytes) * 8 / elements, 1e-9);
      }
    }
  }
}

TEST(CacheStatsTest, AutoBitsMeetTheirBudget) {
  const Data d = MakeData(400, 29);
  for (const double budget : {2.0, 2.5, 3.0, 4.0, 6.0}) {
    const KVCache cache = Fed("palu:fit_tokens=96,bits=auto:" + std::to_string(budget), d);
    EXPECT_LE(cache.Stats().code_bits, budget + 1e-9);
    EXPECT_GT(cache.Stats().code_bits, budget - 0.05);
    EXPECT_LT(cache.Stats().assigned_avg_bits, budget);
  }
}

TEST(CacheStatsTest, ResidualEnergyIsWhatTheBasisLeavesOut) {
  // 12 axes of variance 1, which are kept, and 4 of 1/4.
  const Dims dims = Of(400);
  std::vector<double> stddev(12, 1.0);
  stddev.resize(16, 0.5);
  const Floats x = Planted(dims, stddev, 0, 30);
  const auto stats = [&](const std::string& rank) {
    KVCache cache = MakeCache("palu:reference,n_head_groups=1,rank=" + rank, kHeads, kDim);
    test::Feed(cache, x, dims, x, dims, 0, 400);
    return cache.Stats();
  };
  EXPECT_NEAR(stats("12").residual_energy_k, 1.0 / 13, 0.01);
  EXPECT_NEAR(stats("12").residual_energy_v, 1.0 / 13, 0.01);
  EXPECT_NEAR(stats("16").residual_energy_k, 0, 1e-3);

  // Tokens of another subspace later on: drift shows.
  KVCache cache = MakeCache("palu:reference,n_head_groups=1,rank=16", kHeads, kDim);
  test::Feed(cache, x, dims, x, dims, 0, 400);
  const Floats y = Planted(dims, std::vector<double>(16, 1.0), 0, 31);
  test::Feed(cache, y, dims, y, dims, 0, 400);
  EXPECT_GT(cache.Stats().residual_energy_k, 0.3);
}

}  // namespace
}  // namespace palu
