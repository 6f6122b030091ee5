// Stock llama.cpp on the plug-in gives the logits of its own exact cache, whatever is done to the
// sequences. Client once for each PALU_CACHE; errors are in standard deviations of the exact
// logits.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "scenario_util.h"

namespace palu::ggml {
namespace {

using llama::MakeRandomModel;

std::string ModelName(const testing::TestParamInfo<const char*>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

void PromptAndDecodes(Client& client) {
  client.Feed(0, 600, 128);
  client.Feed(0, 30, 1);
}

// The oldest half after the first four tokens goes, the rest moves there.
void Shift(Client& client, llama_seq_id sequence) {
  const llama_pos end = llama_memory_seq_pos_max(client.memory(), sequence) + 1;
  const llama_pos keep = 4, gone = (end - keep) / 2;
  ASSERT_TRUE(llama_memory_seq_rm(client.memory(), sequence, keep, keep + gone));
  llama_memory_seq_add(client.memory(), sequence, keep + gone, end, -gone);
}

void FeedWithShifts(Client& client) {
  client.Feed(0, 300, 100);
  Shift(client, 0);
  client.Feed(0, 40, 40);
  Shift(client, 0);
  client.Feed(0, 200, 77);
  Shift(client, 0);
  client.Feed(0, 20, 1);
}

// ---- every architecture

class ArchitectureTest : public testing::TestWithParam<const char*> {};

TEST_P(ArchitectureTest, PromptAndDecodesAreThoseOfLlamaCpp) {
  ExpectClose(Pair(GetParam()), {}, PromptAndDecodes);
}

INSTANTIATE_TEST_SUITE_P(All, ArchitectureTest,
                         testing::Values("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3",
                                         "smollm3", "gpt-oss"),
                         ModelName);

// Without phi3: at each shift llama.cpp multiplies all keys by LongRoPE's factor once more.
class ContextShiftTest : public testing::TestWithParam<const char*> {};

TEST_P(ContextShiftTest, IsThatOfLlamaCpp) {
  ExpectClose(Pair(GetParam()), {.cells = 512}, FeedWithShifts);
}

INSTANTIATE_TEST_SUITE_P(All, ContextShiftTest,
                         testing::Values("llama", "qwen2", "qwen3", "gemma2", "gemma3", "smollm3",
                                         "gpt-oss"),
                         ModelName);

// In a model of one layer a key hangs on nothing but its token and its place. So the cache after a
// shift is that of the tokens that stay, fed anew; for LongRoPE and YaRN too, which scale keys.
class OneLayerTest : public testing::TestWithParam<const char*> {};

TEST_P(OneLayerTest, AShiftedCacheIsThatOfTheTokensThatStay) {
  llama::RandomModel random = MakeRandomModel(GetParam());
  random.layers = 1;
  if (random.architecture == "qwen2") random.yarn_factor = 4;
  const Pair pair(random);
  std::vector<Item> items, next;
  Client shifted(pair.palu.get(), {.cells = 512}, false),
      fresh(pair.exact.get(), {.cells = 512}, true);
  shifted.Append(0, 300, items);
  shifted.Decode(items);
  Shift(shifted, 0);
  shifted.Append(0, 60, next);
  shifted.logits().clear();
  shifted.Decode(next);
  items.erase(items.begin() + 4, items.begin() + 4 + 148);
  for (int i = 0; i < 152; ++i) items[i].position = i;
  fresh.Decode(items);
  fresh.logits().clear();
  fresh.Decode(next);
  ExpectWithin(Compare(fresh.logits(), shifted.logits(), random.vocabulary), BoundOf(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(All, OneLayerTest,
                         testing::Values("llama", "qwen2", "qwen3", "phi3", "smollm3"), ModelName);

// ---- sequences, in one stream each and all in one

class SequencesTest : public testing::TestWithParam<bool> {
 protected:
  ClientOptions Four() const { return {.cells = 1024, .sequences = 4, .unified = GetParam()}; }
};

// Chunks of all sequences in one call; ends and whole sequences are removed, their cells are
// written anew.
void Interleave(Client& client) {
  const auto together = [&](int a, int b, int c, int d) {
    std::vector<Item> items;
    client.Append(0, a, items);
    client.Append(1, b, items);
    client.Append(2, c, items);
    client.Append(3, d, items);
    client.Decode(items);
  };
  together(40, 30, 20, 10);
  together(1, 1, 1, 1);
  client.Feed(2, 100, 50);
  ASSERT_TRUE(llama_memory_seq_rm(client.memory(), 2, 60, -1));
  together(5, 70, 33, 1);
  ASSERT_TRUE(llama_memory_seq_rm(client.memory(), 1, -1, -1));
  together(32, 32, 32, 32);
  ASSERT_TRUE(llama_memory_seq_rm(client.memory(), 0, 20, 50));  // a hole
  for (int i = 0; i < 20; ++i) together(1, 1, 1, 1);
  together(64, 1, 17, 3);
}

TEST_P(SequencesTest, AreIndependentWhenInterleavedCutAndWrittenAnew) {
  ExpectClose(Pair("llama"), Four(), Interleave);
}

TEST_P(SequencesTest, AreIndependentInAModelWithWindows) {
  ExpectClose(Pair("gemma3"), Four(), Interleave);
}

void CopyAndGoOn(Client& client) {
  client.Feed(0, 150, 100);
  llama_memory_seq_cp(client.memory(), 0, 1, -1, -1);
  llama_memory_seq_cp(client.memory(), 0, 3, -1, -1);
  client.Feed(0, 10, 1);
  client.Feed(1, 40, 20);
  client.Feed(3, 24, 8);
  ASSERT_TRUE(llama_memory_seq_rm(client.memory(), 0, -1, -1));
  llama_memory_seq_cp(client.memory(), 1, 2, -1, -1);
  client.Feed(2, 30, 15);
  client.Feed(0, 60, 60);
  client.Feed(1, 5, 1);
}

TEST_P(SequencesTest, ACopyGoesOnFromItsSourceWithoutChangingIt) {
  ExpectClose(Pair("llama"), Four(), CopyAndGoOn);
}

TEST_P(SequencesTest, AShiftMovesOneSequenceOnly) {
  ExpectClose(Pair("llama"), Four(), [](Client& client) {
    for (int s = 0; s < 4; ++s) client.Feed(s, 100 + 9 * s, 64);
    Shift(client, 2);
    Shift(client, 0);
    for (int s = 0; s < 4; ++s) client.Feed(s, 25, 5);
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, SequencesTest, testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Unified" : "Streams"; });

// ---- cells

TEST(CellsTest, HolesAreFilledAndWrittenAnew) {
  ExpectClose(Pair("llama"), {.cells = 512}, [](Client& client) {
    client.Feed(0, 400, 128);
    for (int i = 0; i < 5; ++i) {
      // Holes of odd sizes; then more tokens than the cells after the last one.
      const llama_pos end = llama_memory_seq_pos_max(client.memory(), 0) + 1;
      ASSERT_TRUE(llama_memory_seq_rm(client.memory(), 0, 37 + 50 * i, 70 + 50 * i));
      ASSERT_TRUE(llama_memory_seq_rm(client.memory(), 0, end - 101, end - 9));
      client.Feed(0, 125, 61);
    }
    client.Feed(0, 10, 1);
  });
}

TEST(CellsTest, SmallCachesOfWindowsAreWrittenRoundAndRound) {
  for (const char* architecture : {"gemma2", "gemma3"}) {
    ExpectClose(Pair(architecture), {.full_swa = false, .ubatch = 64}, PromptAndDecodes);
  }
}

TEST(CellsTest, SmallCachesOfWindowsServeSeveralSequences) {
  for (const bool unified : {false, true}) {
    const ClientOptions options{
        .sequences = 2, .unified = unified, .full_swa = false, .ubatch = 64};
    ExpectClose(Pair("gemma3"), options, [](Client& client) {
      for (int i = 0; i < 8; ++i) {
        std::vector<Item> items;
        client.Append(0, 40, items);
        client.Append(1, 20 + i, items);
        client.Decode(items);
      }
    });
  }
}

TEST(CellsTest, AnEmptiedCacheStartsAnew) {
  const Pair pair("llama");
  for (const bool data : {true, false}) {
    ExpectClose(pair, {}, [&](Client& client) {
      client.Feed(0, 300, 128);
      llama_memory_clear(client.memory(), data);
      client.Feed(0, 200, 128);
      client.Feed(0, 10, 1);
    });
  }
}

TEST(CellsTest, AnEmptiedCacheGivesTheSameAgain) {
  const Pair pair("llama");
  Client client(pair.palu.get(), {}, false);
  std::vector<Item> items;
  client.Append(0, 128, items);
  const auto feed = [&] {
    llama_memory_clear(client.memory(), true);
    client.logits().clear();
    client.Decode(items);
    for (int i = 0; i < 60; ++i) client.Decode({{7, 128 + i, 0}});
    return client.logits();
  };
  const std::vector<float> first = feed();
  EXPECT_EQ(first, feed());
}

TEST(CellsTest, ResultsDoNotDependOnThreadsOrTheRun) {
  const Pair pair("llama");
  const auto logits = [&](int threads) {
    Client client(pair.palu.get(), {.cells = 512, .threads = threads}, false);
    FeedWithShifts(client);
    return client.logits();
  };
  const std::vector<float> one = logits(1);
  EXPECT_EQ(one, logits(1));
  EXPECT_EQ(one, logits(2));
}

// ---- contexts

TEST(ContextsTest, TwoOfOneModelAndOneOfAnotherDoNotMix) {
  const Pair llama("llama"), gemma("gemma3");
  const auto feed = [&](bool exact) {
    llama_model* const first = exact ? llama.exact.get() : llama.palu.get();
    llama_model* const second = exact ? gemma.exact.get() : gemma.palu.get();
    Client a(first, {}, exact);
    std::vector<float> logits;
    {
      Client b(first, {.cells = 512}, exact), c(second, {.full_swa = false, .ubatch = 64}, exact);
      a.Feed(0, 100, 50);
      b.Feed(0, 30, 30);
      b.Feed(0, 200, 60);
      c.Feed(0, 150, 60);
      a.Feed(0, 90, 45);
      b.Feed(0, 3, 1);
      logits = b.logits();
      logits.insert(logits.end(), c.logits().begin(), c.logits().end());
    }
    a.Feed(0, 64, 64);
    logits.insert(logits.end(), a.logits().begin(), a.logits().end());
    return logits;
  };
  ExpectWithin(Compare(feed(true), feed(false), llama.random.vocabulary), BoundOf("gemma3"));
}

TEST(ContextsTest, LayersThatAreNotOursStayLlamaCpps) {
  // Of three layers and the output, three are offloaded: llama.cpp keeps the first layer, in f16.
  ExpectClose(Pair(MakeRandomModel("llama"), 3), {}, PromptAndDecodes, /*rounded=*/true);
}

TEST(ContextsTest, ANominalTypeOfBf16ChangesNothing) {
  ExpectClose(Pair("llama"), {.nominal = GGML_TYPE_BF16}, PromptAndDecodes);
}

}  // namespace
}  // namespace palu::ggml
