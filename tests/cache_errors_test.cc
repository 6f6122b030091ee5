// Bad input to a KVCache: one clear error, nothing changed, and the cache goes on working.
#include <functional>
#include <limits>

#include "test_util.h"

namespace palu {
namespace {

using namespace test;

constexpr int kLayer = 7, kHeads = 2, kDim = 32;
constexpr int64_t kFilled = 150, kMore = 20;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// A cache with tokens in pages and in the window, and valid arguments for another append and
// attend.
class CacheErrors : public testing::Test {
 protected:
  CacheErrors()
      : rope_(Rope(kDim)),
        dims_{1, kHeads, kMore, kDim},
        k_(Gaussian(dims_.size(), 1)),
        v_(Gaussian(dims_.size(), 2)),
        cache_(Make()) {
    const Dims filled{1, kHeads, kFilled, kDim};
    Feed(cache_, RopedKeys(filled, rope_, 3), filled, Gaussian(filled.size(), 4), filled, 0,
         kFilled, &rope_);
    EXPECT_GT(cache_.Stats().encoded_tokens, 0);
    before_ = Take(cache_);
  }

  static KVCache Make() {
    ModelShape shape;
    shape.layers = {{kLayer, kHeads, kDim, kDim, 0}};
    shape.threads = 1;
    return std::move(KVCacheBuilder::ForModel(
        shape, KVCacheConfig::Parse("palu:fit_tokens=64,recent_tokens=20"))[0]);
  }

  void TearDown() override {
    // Nothing changed, and the next append is as if nothing had happened.
    EXPECT_EQ(Take(cache_), before_);
    cache_.Append(Whole(good_k_, dims_), Whole(good_v_, dims_),
                  {.position = kFilled, .rope = &rope_});
    cache_.Seal();
    EXPECT_EQ(cache_.size(), kFilled + kMore);
  }

  template <class E>
  std::string AppendError(const ConstTensor& k, const ConstTensor& v, const AppendArgs& args) {
    const std::string message = MessageOf<E>([&] { cache_.Append(k, v, args); });
    EXPECT_EQ(cache_.size(), kFilled);
    return message;
  }
  std::string AppendError(const ConstTensor& k, const ConstTensor& v) {
    return AppendError<InputError>(k, v, {.position = -1, .rope = &rope_});
  }
  ConstTensor K() const { return Whole(k_, dims_); }
  ConstTensor V() const { return Whole(v_, dims_); }

  RopeParams rope_;
  Dims dims_;
  Floats k_, v_;
  const Floats good_k_ = Gaussian(kHeads * kMore * kDim, 1),
               good_v_ = Gaussian(kHeads * kMore * kDim, 2);
  KVCache cache_;
  Snapshot before_;
};

TEST_F(CacheErrors, NaNAndInfNameLayerHeadAndToken) {
  for (const auto& [bad, text] :
       {std::pair{kNaN, "NaN"}, std::pair{kInf, "inf"}, std::pair{-kInf, "inf"}}) {
    for (const auto& [h, t, d] :
         {std::tuple{0, 0, 0}, std::tuple{1, 13, 31}, std::tuple{1, 19, 5}}) {
      Floats k = k_;
      k[dims_.at(0, h, t, d)] = bad;
      ExpectSays(AppendError(Whole(k, dims_), V()),
                 {"layer 7", "K", text, "head " + std::to_string(h), "token " + std::to_string(t)});
      Floats v = v_;
      v[dims_.at(0, h, t, d)] = bad;
      ExpectSays(AppendError(K(), Whole(v, dims_)),
                 {"layer 7", "V", text, "head " + std::to_string(h), "token " + std::to_string(t)});
    }
  }
}

TEST_F(CacheErrors, NaNInHalfInputs) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    Floats k = k_;
    k[dims_.at(0, 1, 3, 2)] = kNaN;
    const OwnedTensor bad = ToTensor(k, dims_, dtype);
    ExpectSays(AppendError(bad.view(), V()), {"NaN", "head 1", "token 3"});
  }
}

TEST_F(CacheErrors, BeyondFp16) {
  Floats k = k_;
  k[dims_.at(0, 1, 4, 9)] = -70000;
  ExpectSays(AppendError(Whole(k, dims_), V()), {"layer 7", "70000", "65504", "head 1", "token 4"});
}

TEST_F(CacheErrors, Shapes) {
  const auto shaped = [&](std::array<int64_t, 4> shape) {
    return ConstTensor::Dense(k_.data(), DType::kF32, shape);
  };
  ExpectSays(AppendError(shaped({1, 3, 10, kDim}), V()), {"K", "3", "2"});          // heads
  ExpectSays(AppendError(shaped({1, kHeads, kMore, 16}), V()), {"K", "16", "32"});  // head_dim
  ExpectSays(AppendError(shaped({2, kHeads, 10, kDim}), V()), {"K", "2", "1"});     // batch
  ExpectSays(AppendError(shaped({1, kHeads, 10, kDim}), V()), {"V", "20", "10"});  // K and V differ
  ExpectSays(AppendError(shaped({1, kHeads, 0, kDim}), shaped({1, kHeads, 0, kDim})),
             {"0"});  // no tokens
  ExpectSays(AppendError(shaped({1, kHeads, -4, kDim}), V()), {"-4"});
  ExpectSays(AppendError(K(), shaped({1, 1, kMore, kDim})), {"V"});
}

TEST_F(CacheErrors, NoDataWrongDTypeWrongStride) {
  ConstTensor k = K();
  k.data = nullptr;
  ExpectSays(AppendError(k, V()), {"K", "data"});
  k = K();
  k.dtype = static_cast<DType>(9);
  ExpectSays(AppendError(k, V()), {"K", "dtype", "f16"});
  k = K();
  k.stride[3] = 2;
  ExpectSays(AppendError(k, V()), {"K", "stride", "2", "1"});
}

TEST_F(CacheErrors, PositionsThatDoNotContinue) {
  for (const int64_t position : {int64_t{0}, kFilled - 1, kFilled + 1}) {
    ExpectSays(AppendError<StateError>(K(), V(), {.position = position, .rope = &rope_}),
               {"layer 7", std::to_string(position), std::to_string(kFilled)});
  }
  AppendError<InputError>(K(), V(), {.position = -2, .rope = &rope_});
}

TEST_F(CacheErrors, RopeThatCannotBe) {
  const RopeParams wide = Rope(2 * kDim);
  ExpectSays(AppendError<InputError>(K(), V(), {.position = -1, .rope = &wide}),
             {"rope", "64", "32"});
  RopeParams bad = rope_;
  bad.inv_freq[3] = kNaN;
  ExpectSays(AppendError<InputError>(K(), V(), {.position = -1, .rope = &bad}), {"rope"});
}

TEST_F(CacheErrors, AttendArguments) {
  const Floats q = Gaussian(64 * kDim, 5);
  Floats out(64 * kDim);
  const auto attend = [&](
                          std::array<int64_t, 4> q_shape, std::array<int64_t, 4> out_shape,
                          const std::function<void(AttendArgs&)>& change = [](AttendArgs&) {}) {
    AttendArgs args;
    args.q = ConstTensor::Dense(q.data(), DType::kF32, q_shape);
    change(args);
    return MessageOf<InputError>(
        [&] { cache_.Attend(args, MutableTensor::Dense(out.data(), DType::kF32, out_shape)); });
  };
  ExpectSays(attend({1, 3, 1, kDim}, {1, 3, 1, kDim}), {"3", "2"});  // heads not a multiple
  ExpectSays(attend({1, 2, 1, 16}, {1, 2, 1, kDim}), {"16", "32"});  // head_dim
  ExpectSays(attend({1, 2, 1, kDim}, {1, 2, 1, 16}), {"16", "32"});  // output's head_dim
  ExpectSays(attend({1, 2, 2, kDim}, {1, 2, 1, kDim}), {"1", "2"});  // output's tokens
  ExpectSays(attend({2, 2, 1, kDim}, {2, 2, 1, kDim}), {"2", "1"});  // batch
  ExpectSays(attend({1, 2, 0, kDim}, {1, 2, 0, kDim}), {"0"});       // no queries
  ExpectSays(attend({1, 2, 1, kDim}, {1, 2, 1, kDim}, [](AttendArgs& a) { a.soft_cap = -1; }),
             {"soft_cap"});
  ExpectSays(attend({1, 2, 1, kDim}, {1, 2, 1, kDim}, [](AttendArgs& a) { a.soft_cap = kNaN; }),
             {"soft_cap"});
  ExpectSays(attend({1, 2, 1, kDim}, {1, 2, 1, kDim}, [](AttendArgs& a) { a.scale = kNaN; }),
             {"scale"});
  ExpectSays(attend({1, 2, 1, kDim}, {1, 2, 1, kDim}, [](AttendArgs& a) { a.scale = kInf; }),
             {"scale"});
  const Floats mask(kFilled, 0);
  ExpectSays(attend({1, 2, 1, kDim}, {1, 2, 1, kDim},
                    [&](AttendArgs& a) { a.mask = mask.data(), a.mask_stride = 10; }),
             {"mask_stride", "10", "150"});
  ExpectSays(attend({1, 2, 1, kDim}, {1, 2, 1, kDim}, [](AttendArgs& a) { a.q.data = nullptr; }),
             {"Q"});
  // More queries than tokens.
  const Floats many(2 * 151 * kDim);
  Floats many_out(many.size());
  AttendArgs args;
  args.q = ConstTensor::Dense(many.data(), DType::kF32, {1, 2, 151, kDim});
  ExpectSays(
      MessageOf<InputError>([&] {
        cache_.Attend(args, MutableTensor::Dense(many_out.data(), DType::kF32, {1, 2, 151, kDim}));
      }),
      {"151", "150"});
}

TEST_F(CacheErrors, TrimTooMuch) {
  ExpectSays(MessageOf<StateError>([&] { cache_.Trim(kFilled + 1); }), {"layer 7", "151", "150"});
  MessageOf<StateError>([&] { cache_.Trim(-1); });
}

TEST(CacheErrorsEmpty, NothingToAttendOrTrim) {
  KVCache cache = MakeCache("palu", 2, 32);
  const Floats q = Gaussian(2 * 32, 1);
  MessageOf<StateError>([&] { Attend(cache, q, {1, 2, 1, 32}); });
  ExpectSays(MessageOf<StateError>([&] { cache.Trim(1); }), {"1", "0"});
  EXPECT_NO_THROW(cache.Trim(0));
  EXPECT_NO_THROW(cache.Seal());
  EXPECT_NO_THROW(cache.Clear());
  EXPECT_EQ(cache.Reconstruct().k.shape, (std::array<int64_t, 4>{1, 2, 0, 32}));
}

TEST(CacheErrorsEmpty, AveragedFitNeedsTheRope) {
  const Floats x = Gaussian(2 * 10 * 32, 1);
  const Dims dims{1, 2, 10, 32};
  KVCache cache = MakeCache("palu", 2, 32);
  ExpectSays(MessageOf<StateError>([&] { Feed(cache, x, dims, x, dims, 0, 10); }),
             {"key_fit", "rope", "prompt"});
  EXPECT_EQ(cache.size(), 0);
  // Two rotations in one sequence.
  const RopeParams a = Rope(32), b = Rope(16);
  Feed(cache, x, dims, x, dims, 0, 5, &a);
  ExpectSays(MessageOf<StateError>([&] { Feed(cache, x, dims, x, dims, 5, 5, &b); }), {"rope"});
  EXPECT_EQ(cache.size(), 5);
  // Methods without a basis do not ask.
  KVCache plain = MakeCache("fp16", 2, 32);
  EXPECT_NO_THROW(Feed(plain, x, dims, x, dims, 0, 10));
}

TEST(CacheErrorsEmpty, AFailedFirstAppendLeavesNoTrace) {
  const Dims dims{1, 2, 10, 32};
  Floats bad = Gaussian(dims.size(), 1);
  const Floats good = bad;
  bad[dims.at(0, 1, 9, 31)] = kNaN;
  const RopeParams a = Rope(32), b = Rope(16);
  KVCache cache = MakeCache("palu", 2, 32);
  MessageOf<InputError>(
      [&] { cache.Append(Whole(good, dims), Whole(bad, dims), {.position = 50, .rope = &a}); });
  EXPECT_EQ(cache.size(), 0);
  cache.Append(Whole(good, dims), Whole(good, dims), {.position = -1, .rope = &b});
  EXPECT_NO_THROW(cache.Append(Whole(good, dims), Whole(good, dims), {.position = 10, .rope = &b}));
}

TEST(CacheErrorsBatch, OneBadSequenceStopsAll) {
  const Dims dims{2, 2, 10, 32};
  const Floats good = Gaussian(dims.size(), 1);
  Floats bad = good;
  bad[dims.at(1, 1, 2, 3)] = kInf;
  KVCache cache = MakeCache("fp16", 2, 32, {.batch = 2});
  Feed(cache, good, dims, good, dims, 0, 10);
  const Snapshot before = Take(cache);
  ExpectSays(MessageOf<InputError>([&] { Feed(cache, good, dims, bad, dims, 0, 10); }),
             {"sequence 1", "head 1", "token 2"});
  EXPECT_EQ(Take(cache), before);
}

// ---- the memory limit ----

// Runs a cache against every limit up to what it needs; each call that fails must leave it as it
// was.
void SweepLimits(const std::string& config, int batch) {
  const Dims dims{batch, 2, 260, 32};
  const RopeParams rope = Rope(32);
  const Floats k = RopedKeys(dims, rope, 6), v = Gaussian(dims.size(), 7);
  KVCache unlimited = MakeCache(config, 2, 32, {.batch = batch});
  Feed(unlimited, k, dims, v, dims, 0, 260, &rope);
  const int64_t peak = KVCacheBuilder::Memory(unlimited).peak_bytes;
  int failures = 0, seal_failures = 0, successes = 0;
  for (int64_t limit = 100; limit < peak + 4000; limit += peak / 60) {
    SCOPED_TRACE(limit);
    KVCache cache =
        MakeCache(config + (config == "fp16" ? ":" : ",") + "max_bytes=" + std::to_string(limit), 2,
                  32, {.batch = batch});
    bool failed = false;
    for (int64_t at = 0; at < 260 && !failed; at += 52) {
      const Snapshot before = Take(cache);
      try {
        cache.Append(Slice(k, dims, at, 52), Slice(v, dims, at, 52),
                     {.position = -1, .rope = &rope});
        const Snapshot appended = Take(cache);
        try {
          cache.Seal();
        } catch (const MemoryError& error) {
          failed = true;
          ++seal_failures;
          ExpectSays(error.what(), {"would need", "limit"});
          EXPECT_EQ(Take(cache), appended);
        }
      } catch (const MemoryError& error) {
        failed = true;
        ++failures;
        ExpectSays(error.what(), {"would need", "limit"});
        EXPECT_EQ(Take(cache), before);
      }
      EXPECT_LE(KVCacheBuilder::Memory(cache).allocated_bytes, limit);
      EXPECT_LE(KVCacheBuilder::Memory(cache).peak_bytes, limit);
      EXPECT_EQ(KVCacheBuilder::Memory(cache).allocated_bytes, cache.nbytes());
      EXPECT_EQ(KVCacheBuilder::Memory(cache).limit_bytes, limit);
    }
    successes += !failed;
    // It goes on working with what it has.
    if (cache.size() > 0) {
      const Dims qd{batch, 2, 1, 32};
      EXPECT_TRUE(AllFinite(Attend(cache, Gaussian(qd.size(), 8), qd)));
      EXPECT_NO_THROW(cache.Clear());
    }
  }
  EXPECT_GT(failures, 5);
  EXPECT_GT(successes, 0);
  EXPECT_TRUE(seal_failures > 0 || config.starts_with("fp16"));
}

TEST(CacheLimit, NothingChangesWhenMemoryRunsOut) {
  SweepLimits("palu:fit_tokens=96,recent_tokens=20", 1);
}
TEST(CacheLimit, NothingChangesInABatchEither) {
  SweepLimits("palu:fit_tokens=96,recent_tokens=20", 2);
}
TEST(CacheLimit, NorInTheReferencesRecipe) {
  SweepLimits("palu:reference,fit_tokens=60,rank=16", 2);
}
TEST(CacheLimit, NorWithFp16) { SweepLimits("fp16", 2); }

TEST(CacheLimit, TrimNearTheLimit) {
  // Cutting a page decodes it into a new window page: with no room for it nothing may change.
  const Dims dims{2, 2, 256, 32};
  const RopeParams rope = Rope(32);
  const Floats k = RopedKeys(dims, rope, 9), v = Gaussian(dims.size(), 10);
  const std::string config = "palu:fit_tokens=96,recent_tokens=0,sink_tokens=0";
  const auto feed = [&](KVCache& cache) {
    for (int64_t at = 0; at < 256; at += 32) Feed(cache, k, dims, v, dims, at, 32, &rope);
  };
  KVCache unlimited = MakeCache(config, 2, 32, {.batch = 2});
  feed(unlimited);
  const int64_t peak = KVCacheBuilder::Memory(unlimited).peak_bytes;
  const int64_t resident = unlimited.nbytes();
  int failures = 0;
  for (int64_t room = 0; room < 40000 && resident + room < peak + 40000; room += 1500) {
    const int64_t limit = std::max(peak, resident + room);
    // Fill up to the limit with the forks of other caches, so that Trim has `room` left.
    ModelShape shape = OneLayer(2, 32, {.batch = 2});
    shape.layers.push_back({1, 1, 64, 64, 0});
    std::vector<KVCache> caches = KVCacheBuilder::ForModel(
        shape, KVCacheConfig::Parse(config + ",max_bytes=" + std::to_string(limit)));
    feed(caches[0]);
    const Dims filler{2, 1, 1, 64};
    const Floats one = Gaussian(filler.size(), 11);
    try {
      while (KVCacheBuilder::Memory(caches[0]).allocated_bytes < limit - room) {
        for (int i = 0; i < 32; ++i)
          caches[1].Append(Whole(one, filler), Whole(one, filler), {.position = -1, .rope = &rope});
      }
    } catch (const MemoryError&) {
    }
    const Snapshot before = Take(caches[0]);
    try {
      caches[0].Trim(5);
      EXPECT_EQ(caches[0].size(), 251);
    } catch (const MemoryError&) {
      ++failures;
      EXPECT_EQ(Take(caches[0]), before);
    }
  }
  EXPECT_GT(failures, 0);
}

TEST(CacheLimit, LayersShareIt) {
  const Dims dims{1, 2, 64, 32};
  const Floats x = Gaussian(dims.size(), 12);
  ModelShape shape = ModelShape::Uniform(4, 2, 32);
  const int64_t one_layer = 64 * 2 * 2 * 32 * 2;
  std::vector<KVCache> caches = KVCacheBuilder::ForModel(
      shape, KVCacheConfig::Parse("fp16:max_bytes=" + std::to_string(one_layer * 5 / 2)));
  Feed(caches[0], x, dims, x, dims, 0, 64);
  Feed(caches[1], x, dims, x, dims, 0, 64);
  ExpectSays(MessageOf<MemoryError>([&] { Feed(caches[2], x, dims, x, dims, 0, 64); }),
             {"limit", "40.0 KiB"});
  EXPECT_EQ(caches[2].size(), 0);
  caches[0].Clear();
  EXPECT_NO_THROW(Feed(caches[2], x, dims, x, dims, 0, 64));
}

}  // namespace
}  // namespace palu
