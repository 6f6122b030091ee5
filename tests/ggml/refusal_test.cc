// What the plug-in cannot do ends in one line that says what to do, and never in wrong tokens.
// Each test is a process of its own, which loads the plug-in with its own PALU_CACHE.
#include <gtest/gtest.h>

#include <cstdlib>
#include <sstream>
#include <string>

#include "scenario_util.h"

namespace palu::ggml {
namespace {

// Of the lines that the plug-in printed, without those that tell that it is in use: exactly one,
// with `part` in it.
class OneLine {
 public:
  using is_gtest_matcher = void;
  explicit OneLine(std::string part) : part_(std::move(part)) {}
  bool MatchAndExplain(const std::string& text, std::ostream*) const {
    std::istringstream lines(text);
    int found = 0, other = 0;
    for (std::string line; std::getline(lines, line);) {
      if (!line.starts_with("palu: ") || line.starts_with("palu: palu ") ||
          line.starts_with("palu: KV cache of ")) {
        continue;
      }
      ++(line.find(part_) != std::string::npos ? found : other);
    }
    return found == 1 && other == 0;
  }
  void DescribeTo(std::ostream* out) const { *out << "one line with \"" << part_ << "\""; }
  void DescribeNegationTo(std::ostream* out) const { *out << "not one line with " << part_; }

 private:
  std::string part_;
};

class RefusalTest : public testing::Test {
 protected:
  void SetUp() override {
    // The child starts anew and comes to the same place: OpenMP does not survive a fork.
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    ScenarioPath("");  // before the child, which uses the same
    SetCache("fp32");
  }
  static void SetCache(const char* cache) { setenv("PALU_CACHE", cache, 1); }
};

// The end of a child that was to live: its tests' failures are printed already.
[[noreturn]] void Finish() { std::_Exit(testing::Test::HasFailure() ? 3 : 0); }

llama_context_params SmallContext() {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 256;
  return params;
}

void Start(const char* architecture, const llama_context_params& params) {
  const Pair pair(architecture);
  llama_free(llama_init_from_model(pair.palu.get(), params));
  std::_Exit(0);
}

TEST_F(RefusalTest, FlashAttentionOff) {
  llama_context_params params = SmallContext();
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  EXPECT_EXIT(Start("llama", params), testing::ExitedWithCode(1),
              OneLine("needs flash attention: start with -fa on"));
}

TEST_F(RefusalTest, NominalTypesOfTheCacheOtherThanF16AndBf16) {
  llama_context_params params = SmallContext();
  params.type_k = GGML_TYPE_Q8_0;
  EXPECT_EXIT(Start("llama", params), testing::ExitedWithCode(1),
              OneLine("must be f16 or bf16 (-ctk f16 -ctv f16)"));
  params.type_k = GGML_TYPE_F16;
  params.type_v = GGML_TYPE_F32;
  EXPECT_EXIT(Start("llama", params), testing::ExitedWithCode(1),
              OneLine("must be f16 or bf16 (-ctk f16 -ctv f16)"));
}

TEST_F(RefusalTest, ModelsWithRecurrentLayers) {
  EXPECT_EXIT(Start("mamba", SmallContext()), testing::ExitedWithCode(1), OneLine("recurrent"));
}

TEST_F(RefusalTest, ModelsWithALiBi) {
  EXPECT_EXIT(Start("refact", SmallContext()), testing::ExitedWithCode(1), OneLine("ALiBi"));
}

TEST_F(RefusalTest, ModelsWithLatentAttention) {
  EXPECT_EXIT(Start("deepseek2", SmallContext()), testing::ExitedWithCode(1),
              OneLine("run without --device PALU"));
}

TEST_F(RefusalTest, CachesThatDoNotExist) {
  SetCache("nonsense");
  EXPECT_EXIT(Pair("llama"), testing::ExitedWithCode(1), OneLine("nonsense"));
  SetCache("palu:bits=auto:99");
  EXPECT_EXIT(Pair("llama"), testing::ExitedWithCode(1), OneLine("99"));
}

TEST_F(RefusalTest, CachesThatDoNotFitTheModel) {
  SetCache("palu:rank=64");  // the model's heads have 32 values
  const auto decode = [] {
    const Pair pair("llama");
    Client client(pair.palu.get(), {}, false);
    client.Feed(0, 3, 3);
    Finish();
  };
  EXPECT_EXIT(decode(), testing::ExitedWithCode(1), OneLine("rank"));
}

// ---- failures that a program survives

// What follows is exact again.
void ExpectExact(const Pair& pair, Client& client, const std::vector<Item>& kept,
                 const std::vector<Item>& next) {
  Client exact(pair.exact.get(), {}, true);
  if (!kept.empty()) exact.Decode(kept);
  exact.logits().clear();
  exact.Decode(next);
  client.logits().clear();
  ASSERT_EQ(client.TryDecode(next), 0);
  ExpectWithin(Compare(exact.logits(), client.logits(), pair.random.vocabulary), BoundOf("llama"));
}

void NanKeys() {
  llama::RandomModel random = llama::MakeRandomModel("llama");
  random.nan_token = 5;
  const Pair pair(random);
  Client client(pair.palu.get(), {}, false);
  const auto row = [](int first, int n) {
    std::vector<Item> items;
    for (int i = first; i < first + n; ++i) items.push_back({10 + i % 300, i, 0});
    return items;
  };
  client.Decode(row(0, 40));
  std::vector<Item> bad = row(40, 9);
  bad[4].token = 5;
  EXPECT_NE(client.TryDecode(bad), 0);
  EXPECT_EQ(llama_memory_seq_pos_max(client.memory(), 0), 39);
  ExpectExact(pair, client, row(0, 40), row(40, 30));
  Finish();
}

TEST_F(RefusalTest, ATokenWithNanKeysFailsAloneAndTheSequenceGoesOn) {
  EXPECT_EXIT(NanKeys(), testing::ExitedWithCode(0), OneLine("NaN"));
}

void TooLittleMemory() {
  const Pair pair("llama");
  Client client(pair.palu.get(), {}, false);
  std::vector<Item> first, more, next;
  client.Append(0, 100, first);
  client.Decode(first);
  client.Append(0, 500, more);
  EXPECT_NE(client.TryDecode(more), 0);
  // llama.cpp keeps the ubatches before the one that failed.
  llama_memory_seq_rm(client.memory(), 0, 100, -1);
  client.Append(0, 3, next);
  ExpectExact(pair, client, first, next);
  llama_memory_clear(client.memory(), true);
  ExpectExact(pair, client, {}, first);
  Finish();
}

TEST_F(RefusalTest, MoreTokensThanMaxBytesAllowsFailAndAnEmptiedCacheGoesOn) {
  SetCache("fp32:max_bytes=600000");
  EXPECT_EXIT(TooLittleMemory(), testing::ExitedWithCode(0), OneLine("max_bytes"));
}

TEST_F(RefusalTest, AStateThatDoesNotFitIntoMaxBytes) {
  SetCache("fp32:max_bytes=600000");
  const auto load = [] {
    const Pair pair("llama");
    Client client(pair.palu.get(), {.sequences = 2, .unified = true}, false);
    client.Feed(0, 250, 128);
    std::vector<uint8_t> bytes(llama_state_seq_get_size(client.context(), 0));
    llama_state_seq_get_data(client.context(), bytes.data(), bytes.size(), 0);
    llama_state_seq_set_data(client.context(), bytes.data(), bytes.size(), 1);
    Finish();
  };
  EXPECT_EXIT(load(), testing::ExitedWithCode(1), OneLine("max_bytes"));
}

}  // namespace
}  // namespace palu::ggml
