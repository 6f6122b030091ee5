// Basis files: what a calibrator writes, what a cache makes of it, and files that are refused.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>

#include "fit/basis.h"
#include "fit/calibration_file.h"
#include "methods/side_budgets.h"
#include "test_util.h"

namespace palu {
namespace {

using namespace test;

constexpr int kHeads = 2, kDim = 48;
constexpr int64_t kTokens = 400;

// Queries that live mostly in some planes of the rotation: errors of keys elsewhere hardly matter.
Floats UnevenQueries(const Dims& dims, const RopeParams& rope, uint64_t seed) {
  Floats q = Gaussian(dims.size(), seed);
  const int64_t planes = dims.dim / 2;
  for (size_t i = 0; i < q.size(); ++i) {
    const int64_t d = static_cast<int64_t>(i) % dims.dim;
    q[i] *= static_cast<float>(2 * std::pow(0.8, d % planes));
  }
  Rotate(rope, 0, dims, &q);
  return q;
}

class BasisFile : public testing::Test {
 protected:
  BasisFile()
      : dir_(std::filesystem::temp_directory_path() /
             ("palu_basis_" + std::to_string(::getpid()) + "_" +
              testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::create_directories(dir_);
    shape_ = OneLayer(kHeads, kDim, {});
    shape_.model = "a model";
  }
  ~BasisFile() override { std::filesystem::remove_all(dir_); }

  std::string Path(const std::string& name) const { return (dir_ / name).string(); }

  // A file from keys of the same kind as those of the tests, but other ones.
  std::string Write(const std::string& name = "a.basis") const {
    Calibrator calibrator(shape_, shape_.model);
    const Floats k = RopedKeys(dims_, rope_, 1), v = Gaussian(dims_.size(), 2, 2);
    const Floats q = UnevenQueries(qd_, rope_, 3);
    calibrator.AddKeysValues(0, Whole(k, dims_), Whole(v, dims_), 0, &rope_);
    calibrator.AddQueries(0, Whole(q, qd_), 0, &rope_);
    calibrator.Save(Path(name));
    return Path(name);
  }

  KVCache Open(const std::string& options) const {
    return std::move(KVCacheBuilder::ForModel(shape_, KVCacheConfig::Parse(options))[0]);
  }

  static std::string Bytes(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::string WriteBytes(const std::string& bytes) const {
    std::ofstream(Path("changed.basis"), std::ios::binary) << bytes;
    return Path("changed.basis");
  }

  const RopeParams rope_ = Rope(kDim);
  const Dims dims_{1, kHeads, kTokens, kDim}, qd_{1, 2 * kHeads, kTokens, kDim};
  std::filesystem::path dir_;
  ModelShape shape_;
};

TEST_F(BasisFile, HoldsTheMomentsOfItsText) {
  const Calibration read = LoadCalibration(Write());
  EXPECT_EQ(read.model, "a model");
  ASSERT_EQ(read.layers.size(), 1u);
  const LayerCalibration& layer = read.layers[0];
  ASSERT_EQ(layer.k.size(), 2u);
  Floats k = RopedKeys(dims_, rope_, 1);
  for (int h = 0; h < kHeads; ++h) {
    Moments want(kDim);
    float* rows = &k[dims_.at(0, h, 0)];
    Unrotate(rope_, 0, rows, kTokens, kDim);
    want.Add(rows, kTokens, kDim);
    EXPECT_EQ(layer.k[h].rows, kTokens);
    EXPECT_LT(RelL2(layer.k[h].sum, want.sum), 1e-6);
    EXPECT_LT(RelL2(layer.k[h].second, want.second), 1e-6);
    EXPECT_GT(layer.q[h].Energy(), 0);
  }
}

TEST_F(BasisFile, EncodesFromTheFirstPageWithoutAFit) {
  KVCache cache = Open("palu:recent_tokens=0,sink_tokens=0,key_metric=plain,basis=" + Write());
  const Floats k = RopedKeys(dims_, rope_, 11), v = Gaussian(dims_.size(), 12, 2);
  Feed(cache, k, dims_, v, dims_, 0, 33, &rope_);
  EXPECT_EQ(cache.Stats().encoded_tokens, 32);
  Feed(cache, k, dims_, v, dims_, 33, kTokens - 33, &rope_);
  const KVCache::KV kv = cache.Reconstruct();
  // 4 bits: a relative error of about a tenth.
  EXPECT_LT(RelL2(ToFloats(kv.k), k), 0.2);
  EXPECT_LT(RelL2(ToFloats(kv.v), v), 0.2);
  const Dims qd{1, 4, 3, kDim};
  const Floats q = Gaussian(qd.size(), 13);
  EXPECT_LT(RelL2(Attend(cache, q, qd),
                  PlainAttention(q, qd, ToFloats(kv.k), dims_, ToFloats(kv.v), dims_)),
            AttentionError(cache));
}

TEST_F(BasisFile, LeavesLayersWithAWindowToTheirEightBits) {
  shape_.layers.push_back({1, kHeads, kDim, kDim, 100});
  Calibrator calibrator(shape_, shape_.model);
  const Floats k = RopedKeys(dims_, rope_, 14), v = Gaussian(dims_.size(), 15);
  const Floats q = UnevenQueries(qd_, rope_, 16);
  for (const int layer : {0, 1}) {
    calibrator.AddKeysValues(layer, Whole(k, dims_), Whole(v, dims_), 0, &rope_);
    calibrator.AddQueries(layer, Whole(q, qd_), 0, &rope_);
  }
  calibrator.Save(Path("two.basis"));
  const auto caches = [&](const std::string& config) {
    std::vector<KVCache> caches =
        KVCacheBuilder::ForModel(shape_, KVCacheConfig::Parse(config + ",recent_tokens=10"));
    for (KVCache& cache : caches) Feed(cache, k, dims_, v, dims_, 0, kTokens, &rope_);
    return caches;
  };
  const auto with = caches("palu:basis=" + Path("two.basis")), without = caches("palu:bits=auto:2");
  EXPECT_GT(with[0].Stats().rank_k, 0);
  EXPECT_EQ(Take(with[1]), Take(without[1]));
  EXPECT_EQ(with[1].Stats().code_bits, 8.25);
  const auto exact = caches("palu:windowed_bits=16,basis=" + Path("two.basis"));
  EXPECT_EQ(exact[1].Stats().encoded_tokens, 0);
  EXPECT_EQ(Take(exact[0]), Take(with[0]));
}

TEST_F(BasisFile, QueriesAsTheMetricMakeScoresBetter) {
  const std::string options = "palu:bits=auto:2,recent_tokens=0,sink_tokens=0,basis=" + Write();
  const Floats k = RopedKeys(dims_, rope_, 21), v = Gaussian(dims_.size(), 22);
  const Floats q = UnevenQueries(qd_, rope_, 23);
  const auto score_error = [&](const std::string& config) {
    KVCache cache = Open(config);
    Feed(cache, k, dims_, v, dims_, 0, kTokens, &rope_);
    const Floats got = ToFloats(cache.Reconstruct().k);
    double error = 0;
    for (int64_t h = 0; h < 2 * kHeads; ++h) {
      for (int64_t i = 0; i < kTokens; ++i) {
        double dot = 0;
        for (int64_t d = 0; d < kDim; ++d) {
          const size_t at = dims_.at(0, h / 2, i, d);
          dot += q[qd_.at(0, h, kTokens - 1 - i, d)] * (static_cast<double>(got[at]) - k[at]);
        }
        error += dot * dot;
      }
    }
    return error;
  };
  EXPECT_LT(score_error(options), 0.6 * score_error(options + ",key_metric=plain"));
}

TEST_F(BasisFile, IsSharedByTheSequencesOfACacheAndCountedOnce) {
  shape_.batch = 3;
  KVCache cache = Open("palu:recent_tokens=0,basis=" + Write());
  const Dims dims{3, kHeads, 100, kDim};
  const Floats k = RopedKeys(dims, rope_, 31), v = Gaussian(dims.size(), 32);
  Feed(cache, k, dims, v, dims, 0, 100, &rope_);
  EXPECT_EQ(cache.nbytes(), KVCacheBuilder::Memory(cache).allocated_bytes);
  EXPECT_EQ(cache.Stats().nbytes, cache.nbytes());
  // Encoder and decoder of K and the basis of V per head.
  EXPECT_LT(cache.Stats().basis_bytes, kHeads * (3 * kDim * kDim * 2 + 2 * kDim * 32));
  cache.Clear();
  EXPECT_EQ(cache.nbytes(), KVCacheBuilder::Memory(cache).allocated_bytes);
}

TEST_F(BasisFile, WaitsForItsSinksHoweverFewTokensComeAtOnce) {
  const std::string config = "palu:recent_tokens=0,sink_tokens=70,basis=" + Write();
  const Floats k = RopedKeys(dims_, rope_, 15), v = Gaussian(dims_.size(), 16);
  KVCache once = Open(config), slowly = Open(config);
  Feed(once, k, dims_, v, dims_, 0, 200, &rope_);
  for (int64_t t = 0; t < 200; ++t) Feed(slowly, k, dims_, v, dims_, t, 1, &rope_);
  EXPECT_EQ(slowly.Stats().encoded_tokens, 128);
  const Floats got = ToFloats(slowly.Reconstruct().k);
  EXPECT_EQ(got, ToFloats(once.Reconstruct().k));
  const Dims held{1, kHeads, 200, kDim};
  EXPECT_EQ(CopySlice(got, held, 0, 70), RoundedTo(CopySlice(k, dims_, 0, 70), DType::kF16));
}

TEST_F(BasisFile, HasOneRotation) {
  shape_.batch = 1;
  KVCache cache = Open("palu:recent_tokens=0,basis=" + Write());
  const Floats k = RopedKeys(dims_, rope_, 17), v = Gaussian(dims_.size(), 18);
  Feed(cache, k, dims_, v, dims_, 0, 100, &rope_);
  cache.Clear();
  RopeParams other = rope_;
  other.inv_freq[0] *= 2;
  ExpectSays(MessageOf<StateError>([&] { Feed(cache, k, dims_, v, dims_, 0, 100, &other); }),
             {"one rotation", "basis=FILE"});
  EXPECT_EQ(cache.size(), 0);
  Feed(cache, k, dims_, v, dims_, 0, 100, &rope_);
  EXPECT_EQ(cache.size(), 100);
}

TEST_F(BasisFile, NeedsToKnowTheRotation) {
  KVCache cache = Open("palu:key_fit=prompt,basis=" + Write());
  const Floats x = Gaussian(dims_.size(), 41);
  ExpectSays(MessageOf<StateError>([&] { cache.Append(Whole(x, dims_), Whole(x, dims_)); }),
             {"basis=FILE", "rope"});
  EXPECT_EQ(cache.size(), 0);
}

TEST_F(BasisFile, OfJointHeadsServesJointAndSingleHeads) {
  Calibrator calibrator(shape_, shape_.model, 2);
  // The second head repeats the first: together they need half the channels.
  Floats k = RopedKeys(dims_, rope_, 61), v = Gaussian(dims_.size(), 62);
  for (Floats* x : {&k, &v}) {
    std::copy_n(x->begin(), dims_.tokens * dims_.dim, x->begin() + dims_.tokens * dims_.dim);
  }
  const Floats q = UnevenQueries(qd_, rope_, 63);
  calibrator.AddKeysValues(0, Whole(k, dims_), Whole(v, dims_), 0, &rope_);
  calibrator.AddQueries(0, Whole(q, qd_), 0, &rope_);
  calibrator.Save(Path("joint.basis"));
  const auto value_error = [&](const std::string& options) {
    KVCache cache = Open("palu:bits=auto:2,recent_tokens=0,basis=" + Path("joint.basis") + options);
    Feed(cache, k, dims_, v, dims_, 0, kTokens, &rope_);
    return RelL2(ToFloats(cache.Reconstruct().v), v);
  };
  const double joint = value_error(",joint_heads=2"), single = value_error(",joint_heads=1");
  EXPECT_LT(joint, 0.4 * single);  // 4 bits against 2
  EXPECT_LT(value_error(",joint_heads=2,key_metric=queries,key_mean=rotated"), 0.4 * single);
  EXPECT_GT(single, 0.2);
  const std::string config = "palu:joint_heads=2,basis=" + Write();
  ExpectSays(MessageOf<FormatError>([&] { Open(config); }),
             {"joins 1 heads", "asks for 2", "--joint-heads 2"});
}

TEST_F(BasisFile, SharesTheBudgetByWhatLayersCost) {
  ModelShape two = ModelShape::Uniform(2, kHeads, kDim);
  Calibrator calibrator(two, "");
  const Floats k = RopedKeys(dims_, rope_, 71), v = Gaussian(dims_.size(), 72);
  const Floats q = UnevenQueries(qd_, rope_, 73);
  for (const int layer : {0, 1}) {
    calibrator.AddKeysValues(layer, Whole(k, dims_), Whole(v, dims_), 0, &rope_);
    calibrator.AddQueries(layer, Whole(q, qd_), 0, &rope_);
  }
  const auto bits = [&](const std::string& options) {
    auto caches = KVCacheBuilder::ForModel(
        two, KVCacheConfig::Parse("palu:bits=auto:3,basis=" + Path("two.basis") + options));
    std::vector<double> stored;
    for (KVCache& cache : caches) {
      Feed(cache, k, dims_, v, dims_, 0, kTokens, &rope_);
      stored.push_back(cache.Stats().code_bits);
    }
    return stored;
  };
  calibrator.Save(Path("two.basis"));  // without costs
  EXPECT_NEAR(bits("")[0], 3, 0.1);
  // The values of layer 1 cost 3.5^2 times as much as the rest.
  calibrator.SetCosts(0, 0.01, 0.01);
  calibrator.SetCosts(1, 0.01, 0.1225);
  calibrator.Save(Path("two.basis"));
  const std::vector<double> shared = bits(""), equal = bits(",budgets=equal");
  EXPECT_NEAR(equal[0], 3, 0.1);
  EXPECT_NEAR(equal[1], 3, 0.1);
  EXPECT_NEAR(shared[1] - shared[0], 1, 0.1);  // mean of K and V
  EXPECT_NEAR(shared[0] + shared[1], 6, 0.1);
  ExpectSays(MessageOf<InputError>([&] { calibrator.SetCosts(0, 0, 1); }), {"layer 0", "above 0"});
}

TEST(ShareBitsTest, MeetsTheMeanWithinItsBounds) {
  const std::vector<SideCost> sides = {{1e-6, 64}, {1e-3, 64}, {3.5e-3, 128}, {10, 64}};
  for (const double mean : {1.0, 2.0, 4.0, 7.5}) {
    const std::vector<double> bits = ShareBits(sides, mean);
    double sum = 0, elements = 0;
    for (size_t i = 0; i < sides.size(); ++i) {
      EXPECT_GE(bits[i], kLeastBits);
      EXPECT_LE(bits[i], kMostBits);
      sum += bits[i] * sides[i].elements, elements += sides[i].elements;
    }
    EXPECT_NEAR(sum / elements, mean, 1e-6);
    EXPECT_TRUE(std::is_sorted(bits.begin(), bits.end()));
  }
  const std::vector<double> middle = ShareBits(sides, 4);
  EXPECT_NEAR(middle[2] - middle[1], 1, 1e-6);
}

TEST(OnlyOneSide, IsEncodedAndTheRestStaysExact) {
  const Dims dims{1, 2, 300, 32};
  const RopeParams rope = Rope(32);
  const Floats k = RopedKeys(dims, rope, 81), v = Gaussian(dims.size(), 82);
  auto caches = KVCacheBuilder::ForModel(
      ModelShape::Uniform(2, 2, 32),
      KVCacheConfig::Parse("palu:only=1v,bits=auto:2,fit_tokens=96,recent_tokens=0"));
  for (KVCache& cache : caches) Feed(cache, k, dims, v, dims, 0, 300, &rope);
  EXPECT_EQ(ToFloats(caches[0].Reconstruct().v), RoundedTo(v, DType::kF16));
  const KVCache::KV kv = caches[1].Reconstruct();
  EXPECT_LT(RelL2(ToFloats(kv.k), k), 2e-3);  // fp16 latents
  EXPECT_GT(RelL2(ToFloats(kv.v), v), 0.1);
}

// ---- files that are refused ----

TEST_F(BasisFile, ThatIsMissingOrForeign) {
  const auto error = [&](const std::string& path) {
    return MessageOf<FormatError>([&] { Open("palu:basis=" + path); });
  };
  ExpectSays(error(Path("no.basis")), {"no.basis", "cannot be read"});
  ExpectSays(error(WriteBytes("GGUF and more that is no basis")), {"no basis file", "palu fit"});
  ExpectSays(error(WriteBytes("")), {"changed.basis", "no basis file"});
}

TEST_F(BasisFile, ThatIsTruncatedOrDamagedAnywhere) {
  const std::string bytes = Bytes(Write());
  for (const size_t n : {size_t{8}, size_t{12}, size_t{17}, bytes.size() / 2, bytes.size() - 1}) {
    const std::string path = WriteBytes(bytes.substr(0, n));
    ExpectSays(MessageOf<FormatError>([&] { Open("palu:basis=" + path); }), {"changed.basis"});
  }
  Random random(5);
  for (int round = 0; round < 50; ++round) {
    std::string changed = bytes;
    changed[static_cast<size_t>(random.Between(12, static_cast<int64_t>(bytes.size()) - 1))] ^= 4;
    const std::string path = WriteBytes(changed);
    ExpectSays(MessageOf<FormatError>([&] { Open("palu:basis=" + path); }), {"damaged"});
  }
  std::string changed = bytes;
  changed[8] = 9;
  const std::string path = WriteBytes(changed);
  ExpectSays(MessageOf<FormatError>([&] { Open("palu:basis=" + path); }),
             {"version 9", "palu fit"});
}

TEST_F(BasisFile, OfAnotherModelOrShape) {
  const std::string config = "palu:basis=" + Write();
  const auto error = [&](const ModelShape& shape) {
    return MessageOf<FormatError>(
        [&] { KVCacheBuilder::ForModel(shape, KVCacheConfig::Parse(config)); });
  };
  ModelShape other = shape_;
  other.model = "another";
  ExpectSays(error(other), {"'a model'", "'another'", "palu fit"});
  other = ModelShape::Uniform(2, kHeads, kDim);
  ExpectSays(error(other), {"1 layers", "has 2"});
  ExpectSays(error(OneLayer(kHeads, 64)), {"2 KV heads of 48", "2 KV heads of 64"});
  ExpectSays(error(OneLayer(4, kDim)), {"2 KV heads", "4 KV heads"});
  ExpectSays(error(OneLayer(kHeads, kDim, {.window = 32})), {"window of 32"});
}

TEST_F(BasisFile, ServesSomeOfItsLayersWhereTheShapeSaysSo) {
  // As in llama.cpp's cache for models with sliding windows, which has two buffers.
  const ModelShape two = ModelShape::Uniform(2, kHeads, kDim);
  Calibrator calibrator(two, "");
  const Floats k = RopedKeys(dims_, rope_, 81), v = Gaussian(dims_.size(), 82);
  const Floats q = UnevenQueries(qd_, rope_, 83);
  for (const int layer : {0, 1}) {
    calibrator.AddKeysValues(layer, Whole(k, dims_), Whole(v, dims_), 0, &rope_);
    calibrator.AddQueries(layer, Whole(q, qd_), 0, &rope_);
  }
  calibrator.Save(Path("two.basis"));
  const KVCacheConfig config = KVCacheConfig::Parse("palu:basis=" + Path("two.basis"));
  ModelShape some = two;
  some.layers.erase(some.layers.begin());
  ExpectSays(MessageOf<FormatError>([&] { KVCacheBuilder::ForModel(some, config); }),
             {"2 layers", "has 1"});
  some.partial = true;
  auto caches = KVCacheBuilder::ForModel(some, config);
  Feed(caches[0], k, dims_, v, dims_, 0, kTokens, &rope_);
  EXPECT_GT(caches[0].Stats().encoded_tokens, 0);
  some.layers[0].index = 7;
  ExpectSays(MessageOf<FormatError>([&] { KVCacheBuilder::ForModel(some, config); }),
             {"no layer 7"});
}

TEST_F(BasisFile, StaysWithCellsThatAreCleared) {
  auto caches = KVCacheBuilder::CellsForModel(
      shape_, KVCacheConfig::Parse("palu:recent_tokens=20,basis=" + Write()), kTokens, 1);
  CellCache& cache = caches[0];
  const Floats k = TokenMajor(RopedKeys(dims_, rope_, 5), dims_),
               v = TokenMajor(Gaussian(dims_.size(), 6, 2), dims_);
  std::vector<int64_t> cells(kTokens);
  std::iota(cells.begin(), cells.end(), int64_t{0});
  const auto put = [&](const RopeParams& rope) {
    cache.PutKeys({.cells = cells.data(), .n = kTokens, .rows = k.data(), .rope = &rope});
    cache.PutValues({.cells = cells.data(), .n = kTokens, .rows = v.data()});
    cache.Seal();
  };
  put(rope_);
  EXPECT_GT(cache.Stats().encoded_tokens, 0);
  EXPECT_EQ(cache.nbytes(), KVCacheBuilder::Memory(cache).allocated_bytes);
  cache.Clear();
  EXPECT_EQ(cache.nbytes(), KVCacheBuilder::Memory(cache).allocated_bytes);
  RopeParams other = rope_;
  for (float& f : other.inv_freq) f *= 0.5f;
  ExpectSays(MessageOf<StateError>([&] { put(other); }), {"rope differs", "basis=FILE"});
  put(rope_);
  EXPECT_GT(cache.Stats().encoded_tokens, 0);
}

TEST_F(BasisFile, IsNotWrittenFromTooLittleOrWhereItCannotBe) {
  Calibrator calibrator(shape_, "m");
  const Floats x = RopedKeys(dims_, rope_, 51);
  ExpectSays(MessageOf<StateError>([&] { calibrator.Save(Path("x")); }), {"layer 0", "0 keys"});
  calibrator.AddKeysValues(0, Whole(x, dims_), Whole(x, dims_), 0, &rope_);
  ExpectSays(MessageOf<StateError>([&] { calibrator.Save(Path("x")); }), {"0 queries"});
  const Floats q = Gaussian(qd_.size(), 52);
  calibrator.AddQueries(0, Whole(q, qd_), 0, &rope_);
  ExpectSays(MessageOf<FormatError>([&] { calibrator.Save(Path("no/such/folder")); }),
             {"no/such/folder", "cannot be written"});
  EXPECT_FALSE(std::filesystem::exists(Path("x")));
  ExpectSays(MessageOf<InputError>(
                 [&] { calibrator.AddKeysValues(7, Whole(x, dims_), Whole(x, dims_), 0, &rope_); }),
             {"layer 7"});
}

}  // namespace
}  // namespace palu
