// The program with a real model: the GGUF file of SmolLM2-135M-Instruct that PALU_TEST_MODEL names.
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "program.h"

namespace palu::app {
namespace {

class RealModel : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* path = std::getenv("PALU_TEST_MODEL");
    if (path == nullptr || *path == '\0') GTEST_SKIP() << "PALU_TEST_MODEL is not set";
    model_ = path;
  }

  nlohmann::json Ask(const std::string& cache, const std::string& question, int tokens) {
    const Outcome outcome =
        Palu({"run", "-t", "1", "-m", model_, "-p", question, "-n", std::to_string(tokens),
              "--cache", cache, "--json", folder_.Path("run.json")});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return nlohmann::json::parse(folder_.Get("run.json"));
  }

  TempFolder folder_;
  std::string model_;
};

// About 700 tokens with the template: past the fit of the default cache, which comes after 512.
std::string LongQuestion() {
  std::string text = "The village of Harrow stood beside a slow river. ";
  for (int i = 0; i < 7; ++i) {
    text +=
        "In spring the river rose and the mill turned day and night. The baker sold bread to the "
        "millers and to the boatmen. Children learned to swim near the old stone bridge. In summer "
        "the fields were yellow and the roads were dusty. The teacher, a woman named Miriam, read "
        "stories aloud every Friday. In winter the river froze and the boatmen repaired their "
        "boats. Old men played chess in the inn and argued about the weather. ";
  }
  return text + "\n\nWho read stories aloud?";
}

TEST_F(RealModel, AnswersSensiblyWithThePackedCache) {
  for (const char* cache : {"fp16", "palu"}) {
    const nlohmann::json json = Ask(cache, LongQuestion(), 48);
    const std::string text = json.at("text");
    EXPECT_NE(text.find("Miriam"), std::string::npos) << cache << ": " << text;
    EXPECT_GT(json.at("prompt_tokens"), 600);
    EXPECT_EQ(json.at("stop"), "end of text");
  }
}

TEST_F(RealModel, ThePackedCacheIsSmallerByItsOwnCount) {
  const nlohmann::json fp16 = Ask("fp16", LongQuestion(), 8);
  const nlohmann::json palu = Ask("palu", LongQuestion(), 8);
  const nlohmann::json theirs = Ask("llama:f16", LongQuestion(), 8);
  EXPECT_EQ(fp16.at("prompt_tokens"), palu.at("prompt_tokens"));
  EXPECT_EQ(fp16.at("kv_fp16_bytes"), theirs.at("kv_fp16_bytes"));
  EXPECT_GE(fp16.at("kv_bytes"), fp16.at("kv_fp16_bytes"));
  EXPECT_LT(palu.at("kv_bytes").get<double>(), 0.62 * palu.at("kv_fp16_bytes").get<double>());
  EXPECT_EQ(palu.at("rank_k").size(), 30u);
  EXPECT_EQ(palu.at("rank_v").size(), 30u);
  EXPECT_NEAR(palu.at("stored_bits_per_element").get<double>(),
              16.0 * palu.at("kv_bytes").get<double>() / palu.at("kv_fp16_bytes").get<double>(),
              0.01);
}

TEST_F(RealModel, ChatRemembersEarlierTurns) {
  const Outcome outcome = Palu({"run", "-t", "1", "-m", model_, "-i", "-n", "40"},
                               "What is the capital of France?\nAnd of Spain?\n/exit\n");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("Paris"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("Madrid"), std::string::npos) << outcome.out;
}

}  // namespace
}  // namespace palu::app
