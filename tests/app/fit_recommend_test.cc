// The verbs fit and recommend, from the outside.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "program.h"
#include "text_model.h"

namespace palu::app {
namespace {

using Words = std::vector<std::string>;

class FitAndRecommend : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TempFolder;
    WriteTextModel(Path("model.gguf"), true);
    std::string text;
    for (int i = 0; text.size() < 1500; ++i) text += "Line " + std::to_string(i * 7919) + ". ";
    folder_->Put("text", text);
    folder_->Put("short", "too short");
  }
  static void TearDownTestSuite() { delete folder_; }

  static std::string Path(const std::string& name) { return folder_->Path(name); }
  static Outcome Fit(Words more) {
    Words words = {"fit", "-t", "1", "-m", Path("model.gguf")};
    words.insert(words.end(), more.begin(), more.end());
    return Palu(words);
  }
  static Outcome Recommend(Words more) {
    Words words = {"recommend", "-m", Path("model.gguf"), "--context", "4096"};
    words.insert(words.end(), more.begin(), more.end());
    return Palu(words);
  }

  static TempFolder* folder_;
};

TempFolder* FitAndRecommend::folder_ = nullptr;

TEST_F(FitAndRecommend, ARunStartsFromTheFileThatFitWrote) {
  const Outcome fit =
      Fit({"-f", Path("text"), "-o", Path("a.basis"), "--ctx", "256", "--cost-tokens", "300"});
  ASSERT_EQ(fit.code, 0) << fit.err;
  EXPECT_NE(fit.err.find("palu:basis=" + Path("a.basis")), std::string::npos);
  const Outcome run =
      Palu({"run", "-t", "1", "-m", Path("model.gguf"), "-p", std::string(200, 'x'), "-n", "4",
            "--ignore-eos", "--cache", "palu:key_metric=queries,basis=" + Path("a.basis"), "--json",
            Path("run.json")});
  EXPECT_EQ(run.code, 0) << run.err;
  // Prompts shorter than fit_tokens are packed too.
  EXPECT_EQ(folder_->Get("run.json").find("\"rank_k\": []"), std::string::npos);
}

TEST_F(FitAndRecommend, FitRefusesWhatCannotBe) {
  const Outcome text = Fit({"-f", Path("short"), "-o", Path("b.basis"), "--cost-tokens", "0"});
  EXPECT_EQ(text.code, 1);
  EXPECT_NE(text.err.find("a fit needs at least 11"), std::string::npos) << text.err;
  EXPECT_FALSE(std::filesystem::exists(Path("b.basis")));
  const Outcome out =
      Fit({"-f", Path("text"), "-o", Path("no/such/folder.basis"), "--cost-tokens", "0"});
  EXPECT_EQ(out.code, 1);
  EXPECT_NE(out.err.find("no/such/folder.basis"), std::string::npos) << out.err;
  const Outcome comma = Fit({"-f", Path("text"), "-o", Path("a,b.basis")});
  EXPECT_EQ(comma.code, 2);
  EXPECT_NE(comma.err.find("a,b.basis"), std::string::npos) << comma.err;
  EXPECT_NE(comma.err.find("no comma"), std::string::npos) << comma.err;
  EXPECT_FALSE(std::filesystem::exists(Path("a,b.basis")));
  folder_->Put("foreign.basis", "GGUF");
  const Outcome foreign = Palu({"run", "-m", Path("model.gguf"), "-p", "x", "--cache",
                                "palu:basis=" + Path("foreign.basis")});
  EXPECT_EQ(foreign.code, 1);
  EXPECT_NE(foreign.err.find("no basis file"), std::string::npos) << foreign.err;
}

TEST_F(FitAndRecommend, TakesTheBestThatFits) {
  const Words three = {"--cache",          "fp16",    "--cache",
                       "palu:bits=auto:4", "--cache", "palu:bits=auto:2"};
  const auto with = [&](const std::string& memory) {
    Words words = three;
    words.insert(words.end(), {"--kv-memory", memory});
    return Recommend(words);
  };
  EXPECT_NE(with("1G").out.find("--cache fp16 "), std::string::npos);
  const Outcome large = with("1G"), tiny = with("1K");
  EXPECT_EQ(large.code, 0) << large.err;
  EXPECT_EQ(tiny.code, 1);
  EXPECT_NE(tiny.err.find("no cache holds 4096 tokens"), std::string::npos) << tiny.err;
  EXPECT_NE(tiny.err.find("palu:bits=auto:2, needs"), std::string::npos) << tiny.err;
}

TEST_F(FitAndRecommend, MeasuredRowsComeInTheOrderOfTheirDivergence) {
  folder_->Put("results.json",
               R"({"model": "another", "results": [
                   {"cache": "palu:bits=auto:2", "kl_mean": 0.2, "kl_p999": 2.0},
                   {"cache": "palu:bits=auto:3", "kl_mean": 0.1, "kl_p999": 1.0}]})");
  const Outcome outcome = Recommend({"--kv-memory", "1G", "--results", Path("results.json")});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("--cache palu:bits=auto:3 "), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.err.find("was measured on another"), std::string::npos) << outcome.err;
  folder_->Put("results.json", R"({"model": "model.gguf", "results": [
                   {"cache": "palu:bits=auto:3", "kl_mean": 0.1, "kl_p999": 1.0}]})");
  const Outcome own = Recommend({"--kv-memory", "1G", "--results", Path("results.json")});
  EXPECT_EQ(own.code, 0);
  EXPECT_EQ(own.err, "");
  folder_->Put("results.json", R"({"rows": 3})");
  const Outcome foreign = Recommend({"--kv-memory", "1G", "--results", Path("results.json")});
  EXPECT_EQ(foreign.code, 1);
  EXPECT_NE(foreign.err.find("is no result of `palu eval --json`"), std::string::npos);
}

}  // namespace
}  // namespace palu::app
