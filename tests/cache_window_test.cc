// Layers with a sliding window: exact or at 8 bits, what is visible, what is dropped, trim, forks.
#include "cache_data.h"

namespace palu {
namespace {

using namespace test;

void Append(KVCache& cache, const Data& d, int64_t first, int64_t n) {
  cache.Append(Slice(d.k, d.dims, first, n), Slice(d.v, d.dims, first, n),
               {.position = -1, .rope = &d.rope});
}

KVCache Windowed(const std::string& config, int window, int64_t batch = 1, int threads = 1) {
  return MakeCache(config, kHeads, kDim,
                   {.window = window, .batch = static_cast<int>(batch), .threads = threads});
}

// The queries of the last n tokens see what Reconstruct gives, and no dropped token.
void ExpectAttentionOverWhatIsHeld(const KVCache& cache, int window, int64_t n) {
  const int64_t batch =
      cache.Stats().fp16_bytes / (std::min<int64_t>(cache.size(), window) * kHeads * 2 * kDim * 2);
  const Dims qd{batch, 2 * kHeads, n, kDim}, kd = Of(cache.size(), batch);
  const Floats q = Gaussian(qd.size(), 24);
  const KVCache::KV kv = cache.Reconstruct();
  EXPECT_LT(RelL2(Attend(cache, q, qd), PlainAttention(q, qd, ToFloats(kv.k), kd, ToFloats(kv.v),
                                                       kd, {.window = window})),
            AttentionError(cache))
      << n << " queries at " << cache.size();
}

// ---- exact ----

TEST(CacheWindow, StaysExactAndBoundedAt16Bits) {
  const int window = 50;
  const Data d = MakeData(400, 22);
  for (const std::string config : {"palu:recent_tokens=20,windowed_bits=16", "fp16",
                                   "palu:reference", "palu:only=3k", "kivi:recent_tokens=20"}) {
    SCOPED_TRACE(config);
    KVCache cache = Windowed(config, window);
    const Floats k16 = RoundedTo(d.k, DType::kF16), v16 = RoundedTo(d.v, DType::kF16);
    Random random(23);
    int64_t at = 0;
    while (at < 400) {
      const int64_t n = std::min<int64_t>(400 - at, random.Between(1, 70));
      Append(cache, d, at, n);
      at += n;
      // Queries of the chunk, all the way back to its first.
      const Dims qd{1, 2 * kHeads, n, kDim};
      const Floats q = Gaussian(qd.size(), 24);
      const Floats k = CopySlice(k16, d.dims, 0, at), v = CopySlice(v16, d.dims, 0, at);
      EXPECT_LT(RelL2(Attend(cache, q, qd),
                      PlainAttention(q, qd, k, Of(at), v, Of(at), {.window = window})),
                AttentionError(cache));
      cache.Seal();
      EXPECT_EQ(cache.size(), at);
      EXPECT_EQ(cache.Stats().encoded_tokens, 0);
      // What the chunk's first query saw, in whole pages of 32 tokens at both ends.
      EXPECT_LE(cache.Stats().exact_tokens, window + n + 64);
    }
    const Floats kept = ToFloats(cache.Reconstruct().k);
    EXPECT_EQ(CopySlice(kept, d.dims, 351, 49), CopySlice(k16, d.dims, 351, 49));
    EXPECT_LT(cache.nbytes(), 400 * kHeads * 2 * kDim * 2 / 2);
    EXPECT_EQ(cache.Stats().fp16_bytes, window * kHeads * 2 * kDim * 2);
  }
}

TEST(CacheWindow, TrimsWithinWhatItHasExactly) {
  const Data d = MakeData(400, 25);
  KVCache cache = Windowed("fp16", 100);
  for (int64_t at = 0; at < 300; at += 10) Feed(cache, d, at, 10);
  const Snapshot before = Take(cache);
  ExpectSays(MessageOf<StateError>([&] { cache.Trim(200); }), {"200", "window", "100"});
  EXPECT_EQ(Take(cache), before);
  KVCache one_less = cache.Fork();
  one_less.Trim(1);
  Feed(one_less, d, 299, 1);
  EXPECT_TRUE(CopySlice(Take(one_less).k, Of(300), 201, 99) ==
              CopySlice(before.k, Of(300), 201, 99));
  cache.Trim(300);
  EXPECT_EQ(cache.size(), 0);
  Feed(cache, d, 0, 400);
  EXPECT_EQ(cache.size(), 400);
}

TEST(CacheWindow, LayersOfOneModelDiffer) {
  for (const bool packed : {true, false}) {
    SCOPED_TRACE(packed);
    const std::string options = packed ? "" : ",windowed_bits=16";
    ModelShape shape;
    shape.layers = {{0, 2, 64, 64, 0}, {1, 4, 32, 48, 40}, {2, 1, 128, 64, 0}, {3, 2, 32, 32, 90}};
    shape.threads = 1;
    std::vector<KVCache> caches =
        KVCacheBuilder::ForModel(shape, KVCacheConfig::Parse(std::string(kQuick) + options));
    ASSERT_EQ(caches.size(), 4u);
    const RopeParams rope = Rope(32);
    for (size_t i = 0; i < 4; ++i) {
      const LayerShape& layer = caches[i].shape();
      EXPECT_EQ(layer.index, static_cast<int>(i));
      const Dims kd{1, layer.kv_heads, 250, layer.head_dim_k},
          vd{1, layer.kv_heads, 250, layer.head_dim_v};
      test::Feed(caches[i], Gaussian(kd.size(), 26), kd, Gaussian(vd.size(), 27), vd, 0, 250,
                 &rope);
      EXPECT_EQ(caches[i].Stats().encoded_tokens > 0, layer.window == 0 || packed);
    }
    int64_t sum = 0;
    for (const KVCache& cache : caches) sum += cache.nbytes();
    EXPECT_EQ(KVCacheBuilder::Memory(caches[0]).allocated_bytes, sum);
  }
}

// ---- at 8 bits ----

struct Packed {
  int window, recent;
  const char* options;
};

void PrintTo(const Packed& p, std::ostream* out) {
  *out << "window " << p.window << ", recent " << p.recent << p.options;
}

class PackedWindow : public testing::TestWithParam<Packed> {
 protected:
  std::string config() const {
    return "palu:fit_tokens=96,recent_tokens=" + std::to_string(GetParam().recent) +
           GetParam().options;
  }
  KVCache Make(int64_t batch = 1, int threads = 1) const {
    return Windowed(config(), GetParam().window, batch, threads);
  }
  // More recent tokens than a page are not kept exact.
  int64_t recent() const { return std::min(GetParam().recent, 32); }
};

TEST_P(PackedWindow, AttendSeesWhatReconstructGivesAndThatIsClose) {
  const int window = GetParam().window;
  const Data d = MakeData(500, 31);
  KVCache cache = Make();
  Random random(32);
  bool packed = false;
  for (int64_t at = 0; at < 500;) {
    const int64_t n = std::min<int64_t>(
        500 - at, random.Uniform() < 0.3 ? random.Between(1, 3) : random.Between(1, 2 * window));
    const int64_t before = at;
    Append(cache, d, at, n);
    at += n;
    ExpectAttentionOverWhatIsHeld(cache, window, n);
    cache.Seal();
    ExpectAttentionOverWhatIsHeld(cache, window, 1);

    // All that the chunk's first query saw is there, and no more than whole pages of it.
    const CacheStats stats = cache.Stats();
    const int64_t held = stats.encoded_tokens + stats.exact_tokens;
    EXPECT_GE(held, std::min<int64_t>(at, window + n - 1));
    EXPECT_LE(held, std::min<int64_t>(at, window + n - 1 + 31));
    EXPECT_EQ((at - held) % 32, 0);
    EXPECT_EQ(stats.encoded_tokens, std::max<int64_t>(0, (at - recent()) / 32 * 32 - (at - held)));
    packed |= stats.encoded_tokens > 0;
    const Floats k = ToFloats(cache.Reconstruct().k), v = ToFloats(cache.Reconstruct().v);
    const int64_t exact = at - stats.exact_tokens;
    EXPECT_EQ(CopySlice(k, Of(at), exact, at - exact),
              RoundedTo(CopySlice(d.k, d.dims, exact, at - exact), DType::kF16));
    const int64_t first = std::max<int64_t>(0, before - window + 1);
    EXPECT_LT(
        RelL2(CopySlice(k, Of(at), first, at - first), CopySlice(d.k, d.dims, first, at - first)),
        0.01);
    EXPECT_LT(
        RelL2(CopySlice(v, Of(at), first, at - first), CopySlice(d.v, d.dims, first, at - first)),
        0.01);
  }
  EXPECT_TRUE(packed);
}

TEST_P(PackedWindow, BytesStayFlatInALongDecode) {
  const Data d = MakeData(700, 33);
  const int64_t window = GetParam().window;
  KVCache cache = Make(), exact = Windowed(config() + ",windowed_bits=16", GetParam().window);
  std::vector<int64_t> bytes;
  for (int64_t t = 0; t < 700; ++t) {
    Feed(cache, d, t, 1);
    Feed(exact, d, t, 1);
    bytes.push_back(cache.nbytes());
    ASSERT_EQ(KVCacheBuilder::Memory(cache).allocated_bytes, bytes.back());
    if (t >= window + 128) {
      ASSERT_EQ(bytes[t], bytes[t - 32]) << t;
    }
  }
  ExpectAttentionOverWhatIsHeld(cache, GetParam().window, 1);
  // Of 16 bits: 8.25 or 9 for all but the recent tokens and a page, and a codec of few kilobytes.
  const auto token = static_cast<double>(kHeads * 2 * kDim * 2);
  const double packed = static_cast<double>(window - recent() - 32) * token;
  EXPECT_LT(cache.nbytes(), exact.nbytes() - 0.4 * packed + 6000);
}

TEST_P(PackedWindow, ContentDoesNotDependOnChunksOrThreads) {
  const int window = GetParam().window;
  const Data d = MakeData(500, 34, 2);
  Snapshot want;
  Random random(35);
  for (int round = 0; round < 5; ++round) {
    KVCache cache = Make(2, 1 + round % 3);
    for (int64_t at = 0; at < 499;) {
      const int64_t n = std::min<int64_t>(499 - at, round == 0   ? 1
                                                    : round == 1 ? 499
                                                                 : random.Between(1, 3 * window));
      Append(cache, d, at, n);
      if (random.Uniform() < 0.5) cache.Seal();
      at += n;
    }
    Feed(cache, d, 499, 1);  // drops what the chunks' first queries had kept
    if (round == 0) want = Take(cache);
    EXPECT_EQ(Take(cache), want) << "round " << round;
  }
}

TEST_P(PackedWindow, TrimsFromAPromptIntoItsPages) {
  const int window = GetParam().window;
  const Data d = MakeData(400, 36), other = MakeData(400, 37);
  KVCache full = Make();
  Feed(full, d, 0, 400);
  const Floats k_full = ToFloats(full.Reconstruct().k);
  for (const int64_t n : {0, 1, 5, 20, 31, 32, 33, 64, 100, 200, 340, 399, 400}) {
    SCOPED_TRACE(n);
    KVCache cache = full.Fork();
    cache.Trim(n);
    const int64_t left = 400 - n;
    ASSERT_EQ(cache.size(), left);
    if (left > 0) {
      EXPECT_LT(RelL2(ToFloats(cache.Reconstruct().k), CopySlice(k_full, d.dims, 0, left)), 5e-4);
      ExpectAttentionOverWhatIsHeld(cache, window, 1);
    }
    if (n == 0) continue;
    Append(cache, other, left, n);
    ASSERT_EQ(cache.size(), 400);
    // The chunk's first query sees most of what was cut.
    if (n == 33 || n == 200) ExpectAttentionOverWhatIsHeld(cache, window, n);
    cache.Seal();
    // Nothing was dropped but what the first new token did not see.
    const int64_t first = std::max<int64_t>(0, left - window + 1);
    EXPECT_LT(RelL2(CopySlice(ToFloats(cache.Reconstruct().k), d.dims, first, left - first),
                    CopySlice(d.k, d.dims, first, left - first)),
              0.015);
  }
  EXPECT_TRUE(ToFloats(full.Reconstruct().k) == k_full);
}

TEST_P(PackedWindow, TrimsAsFarAsTheNextTokenSeesWhatIsHeld) {
  const int window = GetParam().window;
  const Data d = MakeData(500, 38);
  for (const int64_t chunk : {1, 7, 40}) {
    KVCache cache = Make();
    for (int64_t at = 0; at < 400; at += chunk) Feed(cache, d, at, std::min(chunk, 400 - at));
    const CacheStats stats = cache.Stats();
    const int64_t held = stats.encoded_tokens + stats.exact_tokens, most = held - window + 1;
    ASSERT_LT(held, 400);
    const Snapshot before = Take(cache);
    ExpectSays(MessageOf<StateError>([&] { cache.Trim(most + 1); }),
               {"cannot trim " + std::to_string(most + 1), "window of " + std::to_string(window),
                "0 to " + std::to_string(most)});
    EXPECT_EQ(Take(cache), before);
    KVCache fork = cache.Fork();
    fork.Trim(most);
    Feed(fork, d, 400 - most, 1);
    // The new token's whole window is there: no zeros of dropped tokens.
    const int64_t first = fork.size() - window;
    EXPECT_LT(RelL2(CopySlice(ToFloats(fork.Reconstruct().k), Of(fork.size()), first, window),
                    CopySlice(d.k, d.dims, first, window)),
              0.015);
    ExpectAttentionOverWhatIsHeld(fork, window, 1);
    cache.Trim(400);
    EXPECT_EQ(cache.size(), 0);
    KVCache fresh = Make();
    for (KVCache* c : {&cache, &fresh}) Feed(*c, d, 0, 500);
    EXPECT_TRUE(Take(cache).k == Take(fresh).k);
  }
}

TEST_P(PackedWindow, ForksShareAndDiverge) {
  const Data d = MakeData(600, 39), other = MakeData(600, 40);
  KVCache a = Make();
  for (int64_t at = 0; at < 300; at += 50) Feed(a, d, at, 50);
  const Snapshot shared = Take(a);
  KVCache b = a.Fork();
  EXPECT_LT(KVCacheBuilder::Memory(a).allocated_bytes, a.nbytes() + b.nbytes() / 10);
  KVCache straight = Make();
  for (int64_t at = 0; at < 300; at += 50) Feed(straight, d, at, 50);
  for (int64_t at = 300; at < 600; at += 30) {
    Feed(b, other, at, 30);
    Feed(straight, other, at, 30);
  }
  EXPECT_EQ(Take(b), Take(straight));
  EXPECT_EQ(Take(a), shared);
  a.Clear();
  b.Clear();
  straight.Clear();
  EXPECT_EQ(KVCacheBuilder::Memory(a).allocated_bytes, a.nbytes() + b.nbytes());
}

TEST_P(PackedWindow, AFailedAppendLeavesWhatTheNextTokenSees) {
  const int window = GetParam().window;
  const Data d = MakeData(500, 41, 2);
  KVCache unlimited = Make(2);
  for (int64_t at = 0; at < 500; at += 100) Feed(unlimited, d, at, 100);
  const int64_t peak = KVCacheBuilder::Memory(unlimited).peak_bytes;
  // What the next token sees; older tokens may go when an append fails.
  const auto visible = [&](const KVCache& cache) {
    const int64_t n = std::min<int64_t>(cache.size(), window - 1), first = cache.size() - n;
    const KVCache::KV kv = cache.Reconstruct();
    Floats both = CopySlice(ToFloats(kv.k), Of(cache.size(), 2), first, n);
    const Floats v = CopySlice(ToFloats(kv.v), Of(cache.size(), 2), first, n);
    both.insert(both.end(), v.begin(), v.end());
    return both;
  };
  int failures = 0, successes = 0;
  for (int64_t limit = peak / 10; limit < peak + peak / 20; limit += peak / 40) {
    SCOPED_TRACE(limit);
    KVCache cache = Windowed(config() + ",max_bytes=" + std::to_string(limit), window, 2);
    bool failed = false;
    for (int64_t at = 0; at < 500 && !failed; at += 100) {
      const Floats before = visible(cache);
      try {
        if (at % 200 == 0) cache.Seal();  // otherwise Append does it
        Append(cache, d, at, 100);
      } catch (const MemoryError& error) {
        failed = true;
        ExpectSays(error.what(), {"would need", "limit"});
        EXPECT_EQ(cache.size(), at);
        // Some of it may be packed by now.
        if (at > 0) {
          EXPECT_LT(RelL2(visible(cache), before), 0.01);
        }
      }
      EXPECT_EQ(KVCacheBuilder::Memory(cache).allocated_bytes, cache.nbytes());
      EXPECT_LE(KVCacheBuilder::Memory(cache).peak_bytes, limit);
    }
    if (failed && cache.size() > 0) ExpectAttentionOverWhatIsHeld(cache, window, 1);
    ++(failed ? failures : successes);
  }
  EXPECT_GT(failures, 5);
  EXPECT_GT(successes, 0);
}

// Windows that are and are not whole pages; barely longer than the recent tokens; no recent tokens.
INSTANTIATE_TEST_SUITE_P(Windows, PackedWindow,
                         testing::Values(Packed{97, 20, ""}, Packed{128, 32, ""},
                                         Packed{200, 64, ""}, Packed{150, 0, ",scales=minmax"},
                                         Packed{67, 31, ""},
                                         Packed{161, 9, ",joint_heads=2,group_size=128"}),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

TEST(PackedWindowMore, NeedsNeitherRotationNorFit) {
  const Data d = MakeData(200, 42);
  KVCache cache = Windowed("palu", 128);
  test::Feed(cache, d.k, d.dims, d.v, d.dims, 0, 200, nullptr);
  EXPECT_EQ(cache.Stats().encoded_tokens, (200 - 32) / 32 * 32);
  EXPECT_EQ(cache.Stats().rank_k, 0);
  EXPECT_EQ(cache.Stats().assigned_avg_bits, 8);
  EXPECT_EQ(cache.Stats().code_bits, 8.25);
}

TEST(PackedWindowMore, StaysExactWhereAllTokensAreRecent) {
  const Data d = MakeData(200, 46);
  for (const int window : {8, 32}) {
    KVCache palu = Windowed("palu", window), fp16 = Windowed("fp16", window);
    for (int64_t at = 0; at < 200; at += 25) {
      Feed(palu, d, at, 25);
      Feed(fp16, d, at, 25);
    }
    EXPECT_EQ(Take(palu), Take(fp16));
  }
}

TEST(PackedWindowMore, IsTheUniformMethodAtEightBits) {
  // The same codes come out of a layer without a window and a method that has no windowed_bits.
  const Data d = MakeData(300, 43);
  KVCache windowed = Windowed("palu:recent_tokens=20,scales=minmax", 100),
          uniform = MakeCache("uniform:bits=8,recent_tokens=20", kHeads, kDim);
  for (int64_t at = 0; at < 300; at += 10) {
    Feed(windowed, d, at, 10);
    Feed(uniform, d, at, 10);
  }
  const Snapshot a = Take(windowed), b = Take(uniform);
  EXPECT_EQ(CopySlice(a.k, Of(300), 200, 100), CopySlice(b.k, Of(300), 200, 100));
  EXPECT_EQ(CopySlice(a.v, Of(300), 200, 100), CopySlice(b.v, Of(300), 200, 100));
}

TEST(PackedWindowMore, SpeculationWithinTheRecentTokensIsNotQuantisedTwice) {
  const Data d = MakeData(300, 44), wrong = MakeData(300, 45);
  KVCache cache = Windowed(kQuick, 70), straight = Windowed(kQuick, 70);
  for (int64_t t = 0; t < 280; t += 2) {
    Feed(cache, wrong, t, 4);
    cache.Trim(4);
    Feed(cache, d, t, 2);
    Feed(straight, d, t, 2);
  }
  EXPECT_EQ(Take(cache), Take(straight));
}

}  // namespace
}  // namespace palu
