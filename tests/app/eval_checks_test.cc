// The checks of `palu eval` beside its distances: pass keys and greedy agreement.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "eval/greedy.h"
#include "eval/needle.h"
#include "llama/model.h"
#include "palu/errors.h"
#include "program.h"
#include "text_model.h"

namespace palu::app {
namespace {

class NeedlePromptTest : public ::testing::TestWithParam<bool> {
 protected:
  NeedlePromptTest() {
    WriteTextModel(folder_.Path("model.gguf"), GetParam());
    model_ = llama::Model::Load(folder_.Path("model.gguf"));
    for (int i = 0; text_.size() < 5000; ++i) text_ += "word" + std::to_string(i) + " ";
  }

  std::string TextOf(const NeedlePrompt& prompt) const {
    std::string text;
    for (const llama::Token token : prompt.tokens) text += model_->Piece(token, true);
    return text;
  }

  TempFolder folder_;
  std::shared_ptr<const llama::Model> model_;
  std::string text_;
};

INSTANTIATE_TEST_SUITE_P(WithAndWithoutTemplate, NeedlePromptTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "chat" : "raw"; });

TEST_P(NeedlePromptTest, FillsTheContextButForTheAnswer) {
  for (const int64_t context : {512, 1000, 4096}) {
    for (const int depth : kNeedleDepths) {
      const auto n =
          static_cast<int64_t>(MakeNeedlePrompt(*model_, text_, context, depth).tokens.size());
      EXPECT_LE(n, context - 16) << depth;
      EXPECT_GT(n, context - 16 - 30) << depth;  // a word or two at the cut
    }
  }
}

TEST_P(NeedlePromptTest, PutsTheNeedleAtItsDepthAndTheQuestionAtTheEnd) {
  double last = -1;
  for (const int depth : kNeedleDepths) {
    const NeedlePrompt prompt = MakeNeedlePrompt(*model_, text_, 3000, depth);
    const std::string text = TextOf(prompt);
    const size_t filler = text.find("word0 ");
    const size_t needle = text.find("The pass key is " + prompt.key + ". Remember it.");
    const size_t question = text.find("What is the pass key?");
    ASSERT_NE(needle, std::string::npos) << text;
    ASSERT_NE(question, std::string::npos);
    EXPECT_LT(needle, question);
    EXPECT_GT(question, text.size() - 150);
    const std::string_view before(text.data(), needle);
    const auto share = static_cast<double>(before.size()) / static_cast<double>(question);
    EXPECT_NEAR(share, depth / 100.0, 0.08);
    EXPECT_GT(share, last);
    last = share;
    EXPECT_EQ(filler<needle, depth> 0);
    // No word is cut: what stands before the needle is whole words.
    if (depth > 0 && depth < 100) {
      const std::string cut(before.substr(before.rfind("word")));
      EXPECT_NE(text_.find(cut.substr(0, cut.find('\n')) + " "), std::string::npos) << cut;
    }
    // The key is told once, and never asked for with itself.
    EXPECT_EQ(text.find(prompt.key, needle + 30), std::string::npos);
    EXPECT_EQ(GetParam(), text.find("assistant") != std::string::npos);
  }
}

TEST_P(NeedlePromptTest, KeysDifferAndHaveFiveDigits) {
  std::set<std::string> keys;
  for (const int64_t context : {512, 1024, 2048}) {
    for (const int depth : kNeedleDepths) {
      keys.insert(MakeNeedlePrompt(*model_, text_, context, depth).key);
    }
  }
  EXPECT_EQ(keys.size(), 15u);
  for (const std::string& key : keys) EXPECT_EQ(key.size(), 5u);
}

TEST_P(NeedlePromptTest, TextsAndContextsThatAreTooShortAreRefused) {
  EXPECT_THROW(MakeNeedlePrompt(*model_, text_, 8192, 0), InputError);
  EXPECT_THROW(MakeNeedlePrompt(*model_, text_, 128, 0), InputError);
  EXPECT_THROW(MakeNeedlePrompt(*model_, "", 2048, 0), InputError);
}

TEST(NeedleAnswer, IsRightWhenItsFirstNumberIsTheKey) {
  EXPECT_TRUE(NamesKey("The pass key is 48213.", "48213"));
  EXPECT_TRUE(NamesKey("48213", "48213"));
  EXPECT_TRUE(NamesKey(" 48213\n\nNext 5", "48213"));
  EXPECT_FALSE(NamesKey("48213 5", "482135"));
  EXPECT_FALSE(NamesKey("The key is 482137.", "48213"));
  EXPECT_FALSE(NamesKey("12 or 48213", "48213"));
  EXPECT_FALSE(NamesKey("I do not know.", "48213"));
  EXPECT_FALSE(NamesKey("", "48213"));
}

TEST(GreedyAgreement, CountsTheCommonStartAndEqualPositions) {
  const std::vector<llama::Token> a = {1, 2, 3, 4, 5, 6};
  const auto expect = [&](const std::vector<llama::Token>& b, int64_t length, int64_t same) {
    EXPECT_EQ(Compare(a, b).length, length);
    EXPECT_EQ(Compare(a, b).same, same);
  };
  expect({1, 2, 3, 4, 5, 6}, 6, 6);
  expect({1, 2, 9, 4, 9, 6}, 2, 4);
  expect({9, 2, 3, 4, 5, 6}, 0, 5);
  expect({9, 9, 9, 9, 9, 9}, 0, 0);
}

}  // namespace
}  // namespace palu::app
