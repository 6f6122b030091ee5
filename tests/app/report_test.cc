#include "report.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "progress.h"

namespace palu::app {
namespace {

RunReport Sample() {
  RunReport r;
  r.model = "m.gguf";
  r.cache = "palu:bits=auto:3";
  r.kernels = "AVX2";
  r.text = "caf\xC3\xA9 \"quoted\"";
  r.stop = "end of text";
  r.prompt_tokens = 4096;
  r.generated_tokens = 200;
  r.prompt_tok_s = 351.26;
  r.decode_tok_s = 80.04;
  r.peak_rss_bytes = 300 << 20;
  r.threads = 2;
  r.stats.tokens = 4295;
  r.stats.kv_fp16_bytes = 100'000'000;
  r.stats.kv_bytes = 20'000'000;
  r.stats.stored_bits_per_element = 3.2;
  r.stats.advertised_bits_per_element = 2.75;
  r.stats.rank_k = {40, 10, 30, 20};
  r.stats.rank_v = {64, 64, 64, 64};
  return r;
}

void ExpectLine(const std::string& text, const std::string& line) {
  EXPECT_NE(text.find(line + "\n"), std::string::npos) << "no line '" << line << "' in\n" << text;
}

TEST(Summarise, GivesMinimumMedianAndMaximum) {
  const RankSummary odd = Summarise({5, 1, 9});
  EXPECT_EQ(odd.min, 1);
  EXPECT_EQ(odd.median, 5);
  EXPECT_EQ(odd.max, 9);
  EXPECT_EQ(Summarise({4, 1, 9, 5}).median, 4.5);
  EXPECT_EQ(Summarise({7}).median, 7);
}

TEST(ReportText, SaysEveryFigure) {
  const std::string text = ToText(Sample());
  ExpectLine(text, "tokens        4096 prompt, 200 generated (end of text)");
  ExpectLine(text, "KV as fp16    95.4 MiB (4295 tokens)");
  ExpectLine(text, "KV allocated  19.1 MiB, 5.00x smaller");
  ExpectLine(text, "bits/element  3.20 stored, 2.75 advertised");
  ExpectLine(text, "rank of K     min 10, median 25, max 40 over 4 layers");
  ExpectLine(text, "rank of V     min 64, median 64, max 64 over 4 layers");
  ExpectLine(text, "speed         prompt 351.3 tok/s, generation 80.0 tok/s");
  ExpectLine(text, "peak memory   300.0 MiB");
  ExpectLine(text, "cache         palu:bits=auto:3");
  ExpectLine(text, "kernels       AVX2, 2 threads");
}

TEST(ReportText, SaysWhatIsMissing) {
  RunReport r = Sample();
  r.stats.rank_k.clear();
  r.stats.rank_v = {0, 0};
  r.decode_tok_s = 0;
  const std::string text = ToText(r);
  ExpectLine(text, "rank of K     none (no basis)");
  ExpectLine(text, "rank of V     not fitted yet, all tokens are exact");
  ExpectLine(text, "speed         prompt 351.3 tok/s, generation not measured");
}

TEST(ReportText, ACacheLargerThanFp16IsNotCalledSmaller) {
  RunReport r = Sample();
  r.stats.kv_bytes = 200'000'000;
  ExpectLine(ToText(r), "KV allocated  190.7 MiB, 2.00x larger");
}

TEST(ReportJson, HasTheFieldsThatScriptsReadAndSurvivesParsing) {
  const nlohmann::json json = nlohmann::json::parse(ToJson(Sample()).dump());
  EXPECT_EQ(json.at("prompt_tokens"), 4096);
  EXPECT_EQ(json.at("generated_tokens"), 200);
  EXPECT_EQ(json.at("text"), "caf\xC3\xA9 \"quoted\"");
  EXPECT_EQ(json.at("cache"), "palu:bits=auto:3");
  EXPECT_EQ(json.at("kv_fp16_bytes"), 100'000'000);
  EXPECT_EQ(json.at("kv_bytes"), 20'000'000);
  EXPECT_EQ(json.at("stored_bits_per_element"), 3.2);
  EXPECT_EQ(json.at("advertised_bits_per_element"), 2.75);
  EXPECT_EQ(json.at("rank_k"), nlohmann::json({40, 10, 30, 20}));
  EXPECT_EQ(json.at("rank_v"), nlohmann::json({64, 64, 64, 64}));
  EXPECT_EQ(json.at("prompt_tok_s"), 351.26);
  EXPECT_EQ(json.at("decode_tok_s"), 80.04);
  EXPECT_EQ(json.at("peak_rss_bytes"), 300 << 20);
}

TEST(ProgressLine, TellsHowFarAndFitsTheTerminal) {
  EXPECT_EQ(
      ProgressLine("prompt", 512, 1024, 2.0, 200),
      "prompt [####################....................] 512/1024 tokens  256 tok/s  2 s left");
  EXPECT_EQ(ProgressLine("prompt", 0, 1024, 0, 60),
            "prompt [....................................] 0/1024 tokens");
  for (int width = 0; width < 120; ++width) {
    const std::string line = ProgressLine("prompt", 700, 1024, 1.0, width);
    EXPECT_LE(static_cast<int>(line.size()), std::max(0, width - 1));
  }
}

TEST(ProgressLine, CanShowAShareInsteadOfTokens) {
  EXPECT_EQ(ProgressLine("chunk 3", 250, 1000, 100, 60, ProgressUnit::kShare),
            "chunk 3 [########........................] 25 %  5 min left");
  EXPECT_EQ(ProgressLine("c", 0, 0, 0, 20, ProgressUnit::kShare), "c [#########] 100 %");
}

TEST(ProgressLine, TellsLongTimesInMinutesAndHours) {
  EXPECT_EQ(DurationText(0.2), "1 s");
  EXPECT_EQ(DurationText(119), "119 s");
  EXPECT_EQ(DurationText(120.5), "3 min");
  EXPECT_EQ(DurationText(7199), "2 h 0 min");
  EXPECT_EQ(DurationText(9000), "2 h 30 min");
}

TEST(ProgressLine, BarIsFullOnlyAtTheEnd) {
  EXPECT_NE(ProgressLine("p", 1023, 1024, 1, 100).find(".]"), std::string::npos);
  EXPECT_EQ(ProgressLine("p", 1024, 1024, 1, 100).find(".]"), std::string::npos);
}

}  // namespace
}  // namespace palu::app
