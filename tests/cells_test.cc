// CellCache: tokens of several sequences in numbered cells that are freed and overwritten at will.
#include <cmath>
#include <limits>
#include <numeric>

#include "cell_host.h"

namespace palu {
namespace {

using namespace test;

class CellShapes : public testing::TestWithParam<CellShape> {};

TEST_P(CellShapes, SequencesThatShareAStreamSeeTheirOwnTokens) {
  const CellShape& s = GetParam();
  Host host(s);
  // Three sequences, a prompt each, then turns of one token: their cells interleave.
  int64_t cell = 0;
  for (int seq = 0; seq < 3; ++seq) {
    host.Put(seq, 0, From(cell, 70));
    cell += 70;
  }
  for (int32_t at = 70; at < 150; ++at) {
    for (int seq = 0; seq < 3; ++seq) host.Put(seq, at, {cell++});
  }
  if (KVCacheConfig::Parse(s.config).Encodes()) {
    EXPECT_GT(host.cache().Stats().encoded_tokens, 190);
  }
  EXPECT_EQ(host.cache().Stats().tokens, 450);
  const double tolerance = Tolerance(host.cache());
  for (int seq = 0; seq < 3; ++seq) ExpectAttends(host, 0, {{seq, 149}}, tolerance);
  std::vector<Token> many;  // more rows than decode takes: the prefill path
  for (int i = 0; i < 40; ++i) many.push_back({i % 3, 20 + 3 * i});
  ExpectAttends(host, 0, many, tolerance);
}

TEST_P(CellShapes, CellsCanBeFreedAndWrittenAnew) {
  const CellShape& s = GetParam();
  Host host(s, 3);
  host.Put(0, 0, From(0, 300));
  host.Put(1, 0, From(300, 100));
  // Sequence 0 loses its middle; sequence 2 takes every second cell of it, sequence 3 some others.
  for (int64_t c = 100; c < 250; ++c) host.Free(c);
  host.Put(2, 0, From(100, 50, 2));
  host.Put(3, 7, From(201, 33));
  const double tolerance = Tolerance(host.cache());
  for (const Token q : {Token{0, 299}, {1, 99}, {2, 49}, {3, 39}}) {
    ExpectAttends(host, 0, {q}, tolerance);
  }
  // What was written last is exact again.
  host.Put(4, 0, {50});
  const Floats before = host.Rows(false, 64, 36);
  host.Put(4, 1, {51});
  EXPECT_EQ(host.Rows(false, 64, 36), before) << "blocks beside the overwritten one stay";
  ExpectAttends(host, 0, {{4, 1}}, tolerance);
}

TEST_P(CellShapes, EveryStreamIsACacheOfItsOwn) {
  CellShape s = GetParam();
  s.streams = 3;
  s.cells = 300;  // not a multiple of 32
  Host host(s, 4);
  for (int seq = 0; seq < 3; ++seq) host.Put(seq, 0, From(seq * s.cells, 250 + 25 * seq));
  host.Put(0, 250, From(250, 1));
  const double tolerance = Tolerance(host.cache());
  for (int seq = 0; seq < 3; ++seq) ExpectAttends(host, seq, {{seq, 240}}, tolerance);
}

TEST_P(CellShapes, ACopyOfAStreamKeepsItsCodes) {
  CellShape s = GetParam();
  s.streams = 2;
  s.cells = 320;
  Host host(s, 6);
  host.Put(0, 0, From(0, 310));
  host.Put(1, 0, From(320, 200));  // overwritten by the copy
  for (int64_t c = 320; c < 520; ++c) host.Free(c);
  for (const bool values : {false, true}) host.cache().Copy(values, 0, 320, 320);
  for (const bool values : {false, true}) {
    EXPECT_EQ(host.Rows(values, 320, 320), host.Rows(values, 0, 320));
  }
  for (int64_t c = 0; c < 310; ++c) host.Move(c, 320 + c);
  Floats want;
  const Floats copy = host.Attend(1, {{0, 309}}, 5, &want),
               first = host.Attend(0, {{0, 309}}, 5, nullptr);
  EXPECT_EQ(copy, first);
  EXPECT_LT(RelL2(copy, want), Tolerance(host.cache()));
  host.Put(0, 310, {310});  // goes on in one of them only
  EXPECT_NE(host.Rows(false, 310, 1), host.Rows(false, 630, 1));
}

TEST_P(CellShapes, ACopyOfAnEmptyStreamLeavesCellsThatCanBeWritten) {
  CellShape s = GetParam();
  s.streams = 2;
  s.cells = 320;
  Host host(s, 17);
  // Positions that do not follow each other, then nothing, then other ones.
  host.Put(0, 5, {320, 322, 321});
  host.Put(0, 40, {323});
  for (const bool values : {false, true}) host.cache().Copy(values, 0, 320, 320);
  for (int64_t c = 320; c < 324; ++c) host.Free(c);
  host.Put(1, 9, {321});
  host.Put(1, 2, From(324, 100));
  ExpectAttends(host, 1, {{1, 101}}, Tolerance(host.cache()));
  EXPECT_EQ(host.cache().Stats().tokens, 101);
}

TEST_P(CellShapes, CopiesOfSomeCellsMoveRows) {
  Host host(GetParam(), 7);
  host.Put(0, 0, From(0, 200));
  for (const bool values : {false, true}) {
    const Floats rows = host.Rows(values, 5, 40);
    host.cache().Copy(values, 5, 301, 40);
    // An exact cell of fp16 takes decoded rows with one rounding.
    EXPECT_LT(RelL2(host.Rows(values, 301, 40), rows), 1e-3);
  }
}

TEST_P(CellShapes, TurnedKeysAreThoseOfTheNewPositions) {
  const CellShape& s = GetParam();
  Host host(s, 8);
  host.Put(0, 0, From(0, 400));
  const Floats before = host.Rows(false, 0, 400);
  std::vector<int32_t> shifts(400, 0);
  for (int c = 120; c < 333; ++c) shifts[c] = -50;
  host.cache().Turn(Rope(s.dim_k / 2 * 2), shifts.data(), 0, 400);
  Floats want = before;
  const RopeParams rope = Rope(s.dim_k / 2 * 2);
  for (int c = 120; c < 333; ++c) {
    const Dims d{1, s.heads, 1, s.dim_k};
    Floats row(want.begin() + c * d.size(), want.begin() + (c + 1) * d.size());
    Rotate(rope, -50, d, &row);
    std::copy(row.begin(), row.end(), want.begin() + c * d.size());
  }
  const Floats after = host.Rows(false, 0, 400);
  const size_t untouched = 96 * s.heads * s.dim_k;  // whole blocks before the first turned cell
  EXPECT_TRUE(std::equal(after.begin(), after.begin() + untouched, before.begin()));
  const bool packs = KVCacheConfig::Parse(s.config).Encodes();
  EXPECT_LT(RelL2(after, want), packs ? 0.15 : 1e-3);
}

TEST_P(CellShapes, BytesAreThoseOfTheAllocator) {
  CellShape s = GetParam();
  s.streams = 2;
  Host host(s, 9);
  auto same = [&](const char* when) {
    const CacheStats stats = host.cache().Stats();
    EXPECT_EQ(stats.nbytes, KVCacheBuilder::Memory(host.cache()).allocated_bytes) << when;
    EXPECT_EQ(stats.nbytes, stats.code_bytes + stats.scale_bytes + stats.basis_bytes +
                                stats.window_bytes + stats.slack_bytes + stats.table_bytes)
        << when;
  };
  same("empty");
  host.Put(0, 0, From(0, 400));
  host.Put(1, 0, From(512, 90));
  same("filled");
  host.Put(0, 400, {400});
  same("sealed");
  host.Put(2, 0, From(37, 100));
  same("reopened");
  for (const bool values : {false, true}) host.cache().Copy(values, 0, 512, 512);
  same("copied");
  host.cache().Clear();
  same("cleared");
  EXPECT_LT(host.cache().nbytes(), 1000);
}

TEST_P(CellShapes, RowsWithoutPositionsTakeThoseOfTheirCells) {
  const CellShape& s = GetParam();
  Host host(s, 10);
  const Dims kd{1, s.heads, 300, s.dim_k}, vd{1, s.heads, 300, s.dim_v};
  const Floats k = TokenMajor(RopedKeys(kd, Rope(s.dim_k / 2 * 2), 3), kd);
  const Floats v = Gaussian(vd.size(), 4);
  const std::vector<int64_t> cells = From(0, 300);
  for (int i = 0; i < 2; ++i) {
    host.cache().PutKeys({.cells = cells.data(), .n = 300, .rows = k.data()});
    host.cache().PutValues({.cells = cells.data(), .n = 300, .rows = v.data()});
    host.cache().Seal();
    // The values are white noise, and two of the shapes keep half of a row or 2 bits of it.
    EXPECT_LT(RelL2(host.Rows(false, 0, 300), k), 0.75);
    EXPECT_LT(RelL2(host.Rows(true, 0, 300), v), 0.75);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, CellShapes,
    testing::Values(
        CellShape{"fp32", "fp32"}, CellShape{"fp16", "fp16"},
        CellShape{"palu", "palu:fit_tokens=96,recent_tokens=20"},
        CellShape{"palu_wide_groups", "palu:fit_tokens=96,recent_tokens=20,group_size=64"},
        CellShape{"one_kv_head", "palu:fit_tokens=64,recent_tokens=8", 1, 4, 128, 80},
        CellShape{"joined", "palu:fit_tokens=96,recent_tokens=20,joint_heads=3"},
        CellShape{"reference", "palu:reference,rank=32,fit_tokens=96,hi_bit=8,lo_bit=6"},
        CellShape{"kivi", "kivi:recent_tokens=32,bits=8"}, CellShape{"q8_0", "q8_0"}),
    [](const auto& info) { return info.param.name; });

// One sequence in order is what KVCache holds.
TEST(Cells, OneSequenceInOrderGetsTheCodesOfKVCache) {
  const std::string config = "palu:fit_tokens=96,recent_tokens=64,sink_tokens=0";
  const Data d = MakeData(400, 11);
  const ModelShape model = ModelShape::Uniform(1, kHeads, kDim);
  KVCache plain = std::move(KVCacheBuilder::ForModel(model, KVCacheConfig::Parse(config))[0]);
  CellCache cells =
      std::move(KVCacheBuilder::CellsForModel(model, KVCacheConfig::Parse(config), 512, 1)[0]);
  const Floats k = TokenMajor(d.k, d.dims), v = TokenMajor(d.v, d.dims);
  for (int64_t at = 0; at < 400; at += 50) {
    Feed(plain, d, at, 50);
    const std::vector<int64_t> places = From(at, 50);
    std::vector<int32_t> positions(places.begin(), places.end());
    cells.PutKeys({.cells = places.data(),
                   .n = 50,
                   .rows = &k[at * kHeads * kDim],
                   .positions = positions.data(),
                   .rope = &d.rope});
    cells.PutValues({.cells = places.data(), .n = 50, .rows = &v[at * kHeads * kDim]});
  }
  plain.Seal();
  cells.Seal();
  EXPECT_EQ(cells.Stats().encoded_tokens, plain.Stats().encoded_tokens);
  EXPECT_EQ(cells.Stats().code_bytes, plain.Stats().code_bytes);
  const KVCache::KV kv = plain.Reconstruct();
  for (const bool values : {false, true}) {
    Floats rows(400 * kHeads * kDim);
    cells.Read(values, 0, 400, rows.data());
    EXPECT_EQ(rows, TokenMajor(ToFloats(values ? kv.v : kv.k), d.dims));
  }
}

TEST(Cells, ThreadsDoNotChangeABit) {
  Floats first;
  for (const int threads : {1, 3, 8}) {
    ModelShape model = ModelShape::Uniform(1, kHeads, kDim);
    model.threads = threads;
    CellCache cache =
        std::move(KVCacheBuilder::CellsForModel(model, KVCacheConfig::Parse(kQuick), 512, 1)[0]);
    const Data d = MakeData(300, 12);
    const Floats k = TokenMajor(d.k, d.dims), v = TokenMajor(d.v, d.dims);
    const std::vector<int64_t> cells = From(0, 300);
    for (int i = 0; i < 2; ++i) {  // the second time every block is opened and packed again
      cache.PutKeys({.cells = cells.data(), .n = 300, .rows = k.data(), .rope = &d.rope});
      cache.PutValues({.cells = cells.data(), .n = 300, .rows = v.data()});
      cache.Seal();
    }
    const Floats q = Gaussian(9 * 64, 13);
    Floats out(9 * 64);
    cache.Attend({.q = ConstTensor::Dense(q.data(), DType::kF32, {1, 9, 1, 64}), .cells = 300},
                 MutableTensor::Dense(out.data(), DType::kF32, {1, 9, 1, 64}));
    if (first.empty()) first = out;
    EXPECT_EQ(out, first) << threads << " threads";
  }
}

TEST(Cells, BadInputSaysWhatIsAllowedAndChangesNothing) {
  Host host({.name = "", .config = kQuick}, 14);
  host.Put(0, 0, From(0, 200));
  const Floats before = host.Rows(false, 0, 512);
  const int64_t bytes = host.cache().nbytes();
  CellCache& cache = host.cache();
  Floats row(kHeads * kDim, 1.0f);
  auto put = [&](int64_t cell, int32_t position) {
    cache.PutKeys({.cells = &cell, .n = 1, .rows = row.data(), .positions = &position});
  };
  ExpectThrows<InputError>([&] { put(512, 0); }, {"cell 512", "0 to 511"});
  ExpectThrows<InputError>([&] { put(-1, 0); }, {"cell -1", "0 to 511"});
  ExpectThrows<InputError>([&] { put(3, -4); }, {"position -4", "at least 0"});
  const int64_t twice[] = {230, 7, 230};
  const Floats rows(3 * row.size(), 1.0f);
  ExpectThrows<InputError>([&] { cache.PutKeys({.cells = twice, .n = 3, .rows = rows.data()}); },
                           {"cell 230 is given twice", "distinct"});
  row[70] = std::numeric_limits<float>::quiet_NaN();
  ExpectThrows<InputError>([&] { put(3, 3); }, {"K has NaN", "head 1", "channel 6"});
  ExpectThrows<InputError>([&] { cache.Copy(false, 500, 0, 20); }, {"20 cells from 500"});
  Floats out(9 * 64);
  const Floats q = Gaussian(9 * 64, 1);
  auto attend = [&](int64_t first, int64_t cells) {
    cache.Attend({.q = ConstTensor::Dense(q.data(), DType::kF32, {1, 9, 1, 64}),
                  .first = first,
                  .cells = cells},
                 MutableTensor::Dense(out.data(), DType::kF32, {1, 9, 1, 64}));
  };
  ExpectThrows<InputError>([&] { attend(32, 32); }, {"from 32", "first cells of a stream"});
  ExpectThrows<InputError>([&] { attend(0, 513); }, {"513 cells", "512 cells"});
  ExpectThrows<StateError>([&] { attend(0, 512); }, {"cells 224 to 255", "was ever written"});
  EXPECT_EQ(host.Rows(false, 0, 512), before);
  EXPECT_EQ(cache.nbytes(), bytes);
}

TEST(Cells, AMemoryLimitStopsThePutAndKeepsWhatIsThere) {
  Host host({.name = "", .config = "fp16:max_bytes=100000"}, 15);
  host.Put(0, 0, From(0, 64));
  const Floats before = host.Rows(true, 0, 64);
  EXPECT_THROW(host.Put(0, 64, From(64, 400)), MemoryError);
  EXPECT_EQ(host.Rows(true, 0, 64), before);
  EXPECT_LE(KVCacheBuilder::Memory(host.cache()).allocated_bytes, 100000);
}

// A list of positions is the last thing that a put may find no memory for.
TEST(Cells, AKeyThatIsThereIsTheOneThatCame) {
  constexpr int64_t kCells = 96;
  const std::vector<int64_t> cells = From(0, kCells);
  std::vector<int32_t> positions(kCells);
  for (int i = 0; i < kCells; ++i) positions[i] = 2 * i;  // a list for every block
  const Floats rows = Gaussian(kCells * kHeads * kDim, 17);
  int64_t there = -1, smaller = 0;
  for (int64_t limit = 64; there < kCells; limit += 64) {
    Host host({.name = "", .config = "fp16:max_bytes=" + std::to_string(limit)}, 17);
    CellCache& cache = host.cache();
    try {
      cache.PutKeys(
          {.cells = cells.data(), .n = kCells, .rows = rows.data(), .positions = positions.data()});
    } catch (const MemoryError&) {
    }
    const int64_t exact = cache.nbytes() / (2 * kHeads * kDim * 2);  // cells that have their place
    if (exact < kCells) continue;                                    // nothing was written
    cache.PutValues({.cells = cells.data(), .n = kCells, .rows = rows.data()});
    there = cache.Stats().tokens;
    smaller += there < kCells;
    const Floats keys = host.Rows(false, 0, kCells);
    for (int64_t i = 0; i < there * kHeads * kDim; ++i) ASSERT_NEAR(keys[i], rows[i], 2e-3);
  }
  EXPECT_GT(smaller, 0) << "no limit stopped a put at a list";
}

TEST(Cells, AQueryThatSeesNoCellGetsZeros) {
  Host host({.name = "", .config = kQuick}, 16);
  host.Put(0, 0, From(0, 200));
  const Floats out = host.Attend(0, {{1, 5}, {0, 199}}, 5, nullptr);
  for (int64_t h = 0; h < 9; ++h) {
    for (int d = 0; d < 64; ++d) ASSERT_EQ(out[(h * 2 + 0) * 64 + d], 0);
  }
  EXPECT_TRUE(AllFinite(out));
  EXPECT_NE(out[64], 0);
}

}  // namespace
}  // namespace palu
