// `palu bench` from the outside.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "expect_failure.h"
#include "palu/methods.h"
#include "program.h"
#include "text_model.h"

namespace palu::app {
namespace {

using Words = std::vector<std::string>;

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

class BenchModelCli : public ::testing::Test {
 protected:
  BenchModelCli() { WriteTextModel(folder_.Path("model.gguf"), false); }

  Outcome Model(Words more) const {
    Words words = {"bench", "model", "-m", folder_.Path("model.gguf"), "-t", "1"};
    words.insert(words.end(), more.begin(), more.end());
    return Palu(words);
  }

  TempFolder folder_;
};

TEST_F(BenchModelCli, HasARowPerDepthAndCache) {
  const Outcome outcome = Model({"--depth", "0,700", "--cache", "palu", "--cache",
                                 "llama:f16,fa=off", "--cache", "llama:q8_0", "--rounds", "2", "-n",
                                 "3", "--prompt", "40", "--json", folder_.Path("out.json")});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto json = nlohmann::json::parse(folder_.Get("out.json"));
  EXPECT_EQ(json.at("model"), "model.gguf");
  EXPECT_EQ(json.at("kernel"), KernelTarget());
  EXPECT_EQ(json.at("threads"), 1);
  ASSERT_EQ(json.at("results").size(), 6u);
  std::set<std::string> rows;
  for (const nlohmann::json& row : json.at("results")) {
    EXPECT_EQ(KeysOf(row),
              (std::set<std::string>{"depth", "cache", "rounds", "prompt_tok_s", "prompt_tok_s_min",
                                     "prompt_tok_s_max", "decode_tok_s", "decode_tok_s_min",
                                     "decode_tok_s_max", "peak_rss_bytes"}));
    EXPECT_EQ(row.at("rounds"), 2);
    for (const std::string speed : {"prompt_tok_s", "decode_tok_s"}) {
      EXPECT_GT(row.at(speed + "_min"), 0);
      EXPECT_LE(row.at(speed + "_min"), row.at(speed));
      EXPECT_LE(row.at(speed), row.at(speed + "_max"));
    }
    EXPECT_GT(row.at("peak_rss_bytes"), 5 << 20);
    rows.insert(row.at("cache").get<std::string>() + row.at("depth").dump());
  }
  EXPECT_EQ(rows.size(), 6u);
  EXPECT_TRUE(rows.contains("palu700"));
  EXPECT_NE(outcome.out.find("depth 700"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("kernels: "), std::string::npos);
}

TEST_F(BenchModelCli, APartThatIsNotMeasuredIsZero) {
  const Outcome outcome = Model({"--depth", "10", "--cache", "fp16", "--rounds", "1", "--prompt",
                                 "0", "-n", "2", "--json", folder_.Path("out.json")});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto json = nlohmann::json::parse(folder_.Get("out.json"));
  EXPECT_EQ(json.at("results")[0].at("prompt_tok_s"), 0);
  EXPECT_GT(json.at("results")[0].at("decode_tok_s"), 0);
}

TEST_F(BenchModelCli, MistakesAreOneErrorBeforeAnyRow) {
  ExpectFailure(Palu({"bench", "model"}), 2, "--model is required");
  ExpectFailure(Palu({"bench", "model", "-m", "missing.gguf"}), 1, "missing.gguf");
  ExpectFailure(Model({"--cache", "fp16", "--cache", "nope"}), 2, "nope: method 'nope' is unknown");
  ExpectFailure(Model({"--cache", "llama:q4_0,fa=off"}), 2, "fa=on");
  ExpectFailure(Model({"--cache", "palu:rank=500"}), 2, "rank=500");
  ExpectFailure(Model({"--depth", "-1"}), 2, "--depth");
  ExpectFailure(Model({"--prompt", "0", "-n", "0"}), 2, "nothing to measure");
  ExpectFailure(Model({"--json", "/nowhere/x"}), 1, "/nowhere/x");
  ExpectFailure(Model({"--depth", "0,60000000", "--cache", "fp16"}), 1,
                "depth 60000000 with fp16 needs at least");
}

TEST_F(BenchModelCli, CtrlCStopsItAndItsRow) {
  bool sent = false;
  Invocation call;
  call.arguments = {"bench",    "model", "-m",      folder_.Path("model.gguf"),
                    "-t",       "1",     "--cache", "fp16",
                    "--depth",  "0",     "-n",      "60000",
                    "--rounds", "1"};
  call.watch = [&sent](pid_t id, const std::string& out) {
    if (!sent && !out.empty()) sent = kill(id, SIGINT) == 0;
  };
  const Outcome outcome = Palu(call);
  EXPECT_TRUE(sent);
  EXPECT_EQ(outcome.code, 130) << outcome.err;
}

}  // namespace
}  // namespace palu::app
