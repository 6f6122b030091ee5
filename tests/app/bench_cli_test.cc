// `palu bench` from the outside.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "palu/methods.h"
#include "program.h"

namespace palu::app {
namespace {

using Words = std::vector<std::string>;

// One line "palu: error: ..." with `part` in it, and nothing on standard output.
void ExpectFailure(const Outcome& outcome, int code, const std::string& part) {
  EXPECT_EQ(outcome.code, code) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(outcome.err.rfind("palu: error: ", 0), 0u) << outcome.err;
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  EXPECT_NE(outcome.err.find(part), std::string::npos) << "no '" << part << "' in " << outcome.err;
}

std::set<std::string> KeysOf(const nlohmann::json& object) {
  std::set<std::string> keys;
  for (const auto& item : object.items()) keys.insert(item.key());
  return keys;
}

Words Attention(Words more) {
  Words words = {"bench", "attention", "-t", "1", "--repeat", "1", "--walk", "1M"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST(BenchCli, AloneItExplainsItself) {
  const Outcome outcome = Palu({"bench"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_NE(outcome.out.find("attention"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("Examples"), std::string::npos) << outcome.out;
  EXPECT_EQ(Palu({"bench", "attention", "--help"}).code, 0);
}

TEST(BenchCli, AttentionHasARowPerCacheForDecodeAndPrefill) {
  const TempFolder folder;
  const Outcome outcome = Palu(Attention(
      {"--shape", "2x1x64", "--tokens", "64,600", "--prefill", "32", "--cache", "palu", "--cache",
       "llama:f16,fa=off", "--cache", "llama:q8_0", "--json", folder.Path("out.json")}));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto json = nlohmann::json::parse(folder.Get("out.json"));
  EXPECT_GT(json.at("limits").at("read_gb_s"), 0.1);
  EXPECT_GT(json.at("limits").at("f32").at("gmac_s"), 0.1);
  ASSERT_EQ(json.at("results").size(), 2u * 2 * 4);
  std::set<std::string> rows;
  for (const nlohmann::json& row : json.at("results")) {
    EXPECT_EQ(KeysOf(row),
              (std::set<std::string>{"shape", "tokens", "queries", "cache", "kernel", "threads",
                                     "ms_median", "ms_min", "gb_s", "vs_fp16"}));
    EXPECT_EQ(row.at("shape"), "2x1x64");
    EXPECT_EQ(row.at("threads"), 1);
    EXPECT_GT(row.at("ms_min"), 0);
    EXPECT_GE(row.at("ms_median"), row.at("ms_min"));
    EXPECT_GT(row.at("gb_s"), 0);
    const std::string cache = row.at("cache");
    EXPECT_TRUE(cache != "fp16" || row.at("vs_fp16") == 1) << row;
    EXPECT_EQ(row.at("kernel") == "llama.cpp", cache.starts_with("llama:"));
    rows.insert(cache + row.at("tokens").dump() + "/" + row.at("queries").dump());
    EXPECT_NE(outcome.out.find(cache), std::string::npos);
  }
  EXPECT_EQ(rows.size(), 16u);
  EXPECT_TRUE(rows.contains("palu600/1"));
  EXPECT_TRUE(rows.contains("palu600/32"));
  EXPECT_NE(outcome.out.find("kernels: "), std::string::npos);
  // 64 tokens are too few to fit a basis on; 600 are not.
  EXPECT_NE(outcome.err.find("2x1x64, 64 tokens: palu: too few tokens"), std::string::npos);
  EXPECT_EQ(outcome.err.find("600 tokens: palu: too few"), std::string::npos) << outcome.err;
}

TEST(BenchCli, AForcedTargetIsTheKernelOfTheRows) {
  const TempFolder folder;
  Invocation call;
  call.arguments = Attention({"--shape", "2x1x32", "--tokens", "64", "--cache", "fp16",
                              "--no-limits", "--prefill", "0", "--json", folder.Path("out.json")});
  const std::string target = SupportedKernelTargets().back();
  call.environment = {{"PALU_TARGET", target}};
  const Outcome outcome = Palu(call);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto json = nlohmann::json::parse(folder.Get("out.json"));
  ASSERT_EQ(json.at("results").size(), 1u);
  EXPECT_EQ(json.at("results")[0].at("kernel"), target);
  EXPECT_TRUE(json.at("limits").is_null());
}

TEST(BenchCli, MistakesAreRefusedBeforeAnyWork) {
  ExpectFailure(Palu({"bench", "nonsense"}), 2, "nonsense");
  ExpectFailure(Palu(Attention({})), 2, "--shape is required");
  ExpectFailure(Palu(Attention({"--shape", "9x2x64"})), 2, "a multiple of the KV heads");
  ExpectFailure(Palu(Attention({"--shape", "9x3"})), 2, "is not HxKxD");
  ExpectFailure(Palu(Attention({"--shape", "2x1x64", "--tokens", "0"})), 2, "--tokens");
  ExpectFailure(Palu(Attention({"--shape", "2x1x64", "--cache", "nope"})), 2, "'nope' is unknown");
  ExpectFailure(Palu(Attention({"--shape", "2x1x64", "--cache", "llama:f17"})), 2, "no type 'f17'");
  ExpectFailure(Palu(Attention({"--shape", "2x1x64", "--memory", "100K"})), 1,
                "allowed: 100.0 KiB");
  ExpectFailure(Palu(Attention({"--shape", "2x1x64", "--json", "/nowhere/x"})), 1, "/nowhere/x");
}

}  // namespace
}  // namespace palu::app
