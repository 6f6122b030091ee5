// Epochs of a CellCache: another text gets another fit, and what the old one packed stays as it is.
#include "cell_host.h"

namespace palu {
namespace {

using namespace test;

// A trial comes about 2,048 + 2,048 + 256 packed tokens after a fit.
constexpr char kSpec[] = "palu:bits=auto:3,fit_tokens=512,recent_tokens=32";
constexpr int64_t kPastTrial = 4608;

CellShape Shape(int64_t cells, int streams = 1, std::string config = kSpec) {
  CellShape shape{.name = "", .config = std::move(config)};
  shape.heads = 2, shape.q_heads = 6, shape.cells = cells, shape.streams = streams;
  return shape;
}

// Puts n tokens of a text in chunks, as a prompt comes, at the positions of their cells within the
// stream. Returns their values.
Floats PutText(Host& host, int text, int64_t first, int64_t n, int stream = 0) {
  Floats values;
  host.SetText(text);
  for (int64_t i = 0; i < n; i += 256) {
    const int64_t count = std::min<int64_t>(256, n - i);
    host.Put(stream, static_cast<int32_t>(first + i),
             From(stream * host.cache().cells_per_stream() + first + i, count));
    values.insert(values.end(), host.last_values().begin(), host.last_values().end());
  }
  return values;
}

int Epochs(Host& host) { return host.cache().Stats().epochs; }

void ExpectBytesOfTheAllocator(Host& host) {
  EXPECT_EQ(host.cache().nbytes(), KVCacheBuilder::Memory(host.cache()).allocated_bytes);
}

// A decode step and a chunk, over everything that is there.
void ExpectAttendsOverAll(Host& host, int64_t tokens, int stream = 0) {
  const auto last = static_cast<int32_t>(tokens - 1);
  ExpectAttends(host, stream, {{stream, last}}, 3e-4);
  std::vector<Token> many;
  for (int32_t i = 0; i < 6; ++i) many.push_back({stream, last / 6 * (i + 1)});
  ExpectAttends(host, stream, many, 3e-4);
}

TEST(Epochs, TheFirstBeginsWithTheFitAndClearForgetsThemAll) {
  Host host(Shape(1024));
  PutText(host, 1, 0, 256);
  EXPECT_EQ(Epochs(host), 0);
  PutText(host, 1, 256, 512);
  EXPECT_EQ(Epochs(host), 1);
  host.cache().Clear();
  EXPECT_EQ(Epochs(host), 0);
  ExpectBytesOfTheAllocator(host);
}

TEST(Epochs, WithoutAnOptionTheFitWaitsForAQuarterOfTheCells) {
  for (const auto& [cells, due] : {std::pair{1024, 512}, {4096, 1024}, {16384, 2048}}) {
    Host host(Shape(cells, 1, "palu"));
    PutText(host, 1, 0, due - 256);
    EXPECT_EQ(Epochs(host), 0) << cells;
    PutText(host, 1, due - 256, 512);
    EXPECT_EQ(Epochs(host), 1) << cells;
  }
}

TEST(Epochs, OneTextKeepsItsFit) {
  Host host(Shape(10240));
  PutText(host, 1, 0, 10240);
  EXPECT_EQ(Epochs(host), 1);
  ExpectBytesOfTheAllocator(host);
}

TEST(Epochs, AnotherTextBeginsOneAndIsPackedBetterFromThenOn) {
  Host host(Shape(12288));
  PutText(host, 1, 0, 2048);
  const int64_t begin = 2048, n = 2 * kPastTrial;
  const Floats values = PutText(host, 2, begin, n);
  EXPECT_EQ(Epochs(host), 2);
  PutText(host, 2, begin + n, 64);  // everything before is packed now
  const auto error = [&](int64_t first) {
    const int64_t width = 2 * 64, count = 512;
    const Floats want(values.begin() + first * width, values.begin() + (first + count) * width);
    return RelL2(host.Rows(true, begin + first, count), want);
  };
  EXPECT_LT(error(n - 512), 0.8 * error(0));
  ExpectAttendsOverAll(host, begin + n);
  ExpectBytesOfTheAllocator(host);
}

TEST(Epochs, BytesAreThoseOfTheAllocatorWhileASampleIsTaken) {
  Host host(Shape(6144));
  PutText(host, 1, 0, 1024);
  for (int64_t first = 1024; first < 6144; first += 256) {
    PutText(host, 2, first, 256);
    ExpectBytesOfTheAllocator(host);
  }
  EXPECT_EQ(Epochs(host), 2);
}

TEST(Epochs, ThereAreAtMostFourAtATime) {
  Host host(Shape(5 * kPastTrial));
  for (int text = 1; text <= 5; ++text) PutText(host, text, (text - 1) * kPastTrial, kPastTrial);
  EXPECT_EQ(Epochs(host), 4);
  ExpectAttendsOverAll(host, 5 * kPastTrial);
  ExpectBytesOfTheAllocator(host);
}

TEST(Epochs, OnesThatAreOverwrittenMakeRoom) {
  const int64_t cells = 2 * kPastTrial;
  Host host(Shape(cells));
  // A server that goes round its cells: text after text, without an end.
  for (int text = 1; text <= 3; ++text) {
    PutText(host, text, 0, cells);
    ASSERT_LE(Epochs(host), 4);
    ExpectBytesOfTheAllocator(host);
  }
  const Floats values = PutText(host, 3, 0, cells);
  PutText(host, 3, 0, 64);
  const Floats want(values.begin() + (cells - 768) * 128, values.begin() + (cells - 256) * 128);
  EXPECT_LT(RelL2(host.Rows(true, cells - 768, 512), want), 0.25);
  ExpectAttendsOverAll(host, cells);
}

TEST(Epochs, CopiesOfAStreamKeepTheCodesOfEveryOne) {
  Host host(Shape(3 * kPastTrial, 2));
  PutText(host, 1, 0, 2048);
  PutText(host, 2, 2048, 2 * kPastTrial);
  ASSERT_EQ(Epochs(host), 2);
  const int64_t n = host.cache().cells_per_stream();
  for (const bool values : {false, true}) host.cache().Copy(values, 0, n, n);
  for (const bool values : {false, true})
    EXPECT_EQ(host.Rows(values, n, n), host.Rows(values, 0, n));
  // The one goes on, the other does not change.
  const Floats before = host.Rows(false, n, n);
  PutText(host, 3, 0, 2048);
  EXPECT_EQ(host.Rows(false, n, n), before);
  ExpectBytesOfTheAllocator(host);
}

TEST(Epochs, TurnedKeysStayInTheirOwn) {
  Host host(Shape(3 * kPastTrial));
  PutText(host, 1, 0, 2048);
  PutText(host, 2, 2048, 2 * kPastTrial);
  ASSERT_EQ(Epochs(host), 2);
  const int64_t n = 2048 + 2 * kPastTrial;
  Floats want = host.Rows(false, 0, n);
  const std::vector<int32_t> shifts(static_cast<size_t>(n), 40);
  host.cache().Turn(Rope(64), shifts.data(), 0, n);
  for (int64_t c = 0; c < n; ++c) {
    const Dims d{1, 2, 1, 64};
    Floats row(want.begin() + c * 128, want.begin() + (c + 1) * 128);
    Rotate(Rope(64), 40, d, &row);
    std::copy(row.begin(), row.end(), want.begin() + c * 128);
  }
  EXPECT_LT(RelL2(host.Rows(false, 0, n), want), 0.2);
  EXPECT_EQ(Epochs(host), 2);
}

TEST(Epochs, WhereMemoryIsShortTheFitStays) {
  CellShape shape = Shape(8192);
  shape.heads = 1, shape.q_heads = 3, shape.dim_k = shape.dim_v = 256;
  constexpr int64_t kSample = 256 * 257 * 8 * 2;  // bytes of second moments
  constexpr int64_t kTrial = 2560;                // tokens from the first of the sample on
  Host roomy(shape);
  PutText(roomy, 1, 0, 2048);
  int64_t at = 2048, before = 0;
  while (roomy.cache().Stats().table_bytes < kSample) {
    before = KVCacheBuilder::Memory(roomy.cache()).allocated_bytes;
    PutText(roomy, 2, at, 256);
    at += 256;
  }
  PutText(roomy, 2, at, kTrial);
  EXPECT_EQ(Epochs(roomy), 2);
  // Enough for the tokens, but not for the sample; or for the sample, until tokens need its place.
  for (const int64_t most : {before + kSample * 3 / 4, before + kSample + 150000}) {
    shape.config = std::string(kSpec) + ",max_bytes=" + std::to_string(most);
    Host tight(shape);
    PutText(tight, 1, 0, 2048);
    PutText(tight, 2, 2048, at + kTrial - 2048);
    EXPECT_EQ(Epochs(tight), 1);
    EXPECT_LE(KVCacheBuilder::Memory(tight.cache()).allocated_bytes, most);
    ExpectBytesOfTheAllocator(tight);
  }
}

TEST(Epochs, WhatTheOldSubspaceLeavesOutCounts) {
  Host host(Shape(12288, 1, "palu:rank=24,bits=4,fit_tokens=512,recent_tokens=32"));
  PutText(host, 1, 0, 2048);
  PutText(host, 2, 2048, 2 * kPastTrial);
  EXPECT_EQ(Epochs(host), 2);
}

TEST(Epochs, MethodsWithoutAFitHaveOne) {
  Host host(Shape(12288, 1, "uniform:bits=4,recent_tokens=32"));
  PutText(host, 1, 0, 2048);
  PutText(host, 2, 2048, 2 * kPastTrial);
  EXPECT_EQ(Epochs(host), 1);
}

TEST(Epochs, ThreadsDoNotChangeABit) {
  std::vector<Floats> outs;
  for (const int threads : {1, 3}) {
    Host host(Shape(3 * kPastTrial));
    host.cache().SetThreads(threads);
    PutText(host, 1, 0, 2048);
    PutText(host, 2, 2048, 2 * kPastTrial);
    ASSERT_EQ(Epochs(host), 2);
    outs.push_back(host.Attend(0, {{0, 2047 + 2 * kPastTrial}}, 5, nullptr));
    outs.push_back(host.Rows(true, 0, 2048 + 2 * kPastTrial));
  }
  EXPECT_EQ(outs[0], outs[2]);
  EXPECT_EQ(outs[1], outs[3]);
}

}  // namespace
}  // namespace palu
