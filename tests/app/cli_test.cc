// The program from the outside: what it prints, where, and with which exit code.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "expect_failure.h"
#include "program.h"
#include "text_model.h"
#include "utf8.h"

namespace palu::app {
namespace {

using Words = std::vector<std::string>;

class Cli : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TempFolder;
    WriteTextModel(Model(), true);
    WriteTextModel(RawModel(), false);
    std::string text;
    for (int i = 0; text.size() < 700; ++i) text += "Line " + std::to_string(i * 7919) + ". ";
    folder_->Put("text", text);
  }
  static void TearDownTestSuite() { delete folder_; }

  static std::string Path(const std::string& name) { return folder_->Path(name); }
  static std::string Model() { return Path("chat.gguf"); }
  static std::string RawModel() { return Path("raw.gguf"); }

  // `palu run -m MODEL ...`
  static Words RunWith(Words more) {
    // One thread: two of llama.cpp's wait for each other in a loop, which is slow beside other
    // tests.
    Words words = {"run", "-t", "1", "-m", Model()};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  static nlohmann::json Json(const std::string& name) {
    return nlohmann::json::parse(folder_->Get(name));
  }

  static TempFolder* folder_;
};

TempFolder* Cli::folder_ = nullptr;

TEST_F(Cli, HelpAndVersionGoToStandardOutput) {
  for (const Words& words : {Words{"--help"}, Words{"run", "--help"}, Words{"inspect", "--help"},
                             Words{"methods", "--help"}}) {
    const Outcome outcome = Palu(words);
    EXPECT_EQ(outcome.code, 0);
    EXPECT_NE(outcome.out.find("Usage: palu"), std::string::npos) << outcome.out;
    EXPECT_EQ(outcome.err, "");
  }
  const Outcome version = Palu({"--version"});
  EXPECT_EQ(version.code, 0);
  EXPECT_EQ(version.out.rfind("palu ", 0), 0u);
}

TEST_F(Cli, WrongUsageExitsWithTwo) {
  ExpectFailure(Palu(Words{}), 2, "subcommand");
  ExpectFailure(Palu({"fly"}), 2, "no verb fly");
  ExpectFailure(Palu({"run", "-p", "x"}), 2, "--model is required");
  ExpectFailure(Palu({"inspect", "-t", "1", "-m", "x"}), 2, "--file is required");
  ExpectFailure(Palu(RunWith({})), 2, "nothing to answer");
  ExpectFailure(Palu(RunWith({"-p", "x", "--no-such-option"})), 2, "--no-such-option");
  ExpectFailure(Palu(RunWith({"-p", "x", "--threads", "9999"})), 2, "9999");
  ExpectFailure(Palu(RunWith({"-p", "x", "-n", "-5"})), 2, "-5");
  ExpectFailure(Palu(RunWith({"-p", "x", "-n", "many"})), 2, "many");
  ExpectFailure(Palu(RunWith({"-p", "x", "--kv-memory", "12Q"})), 2, "12Q");
  ExpectFailure(Palu(RunWith({"-p", "x", "--temp", "-1"})), 2, "--temp -1");
  ExpectFailure(Palu(RunWith({"-i", "--raw"})), 2, "--raw");
  ExpectFailure(Palu(RunWith({"-i", "--json", Path("j")})), 2, "--json");
}

TEST_F(Cli, WrongCachesExitWithTwoAndNameTheOption) {
  const auto with = [](const std::string& cache) {
    return Palu(RunWith({"-p", "x", "--cache", cache}));
  };
  ExpectFailure(with("palo"), 2, "palo");
  ExpectFailure(with("palu:rang=3"), 2, "rang");
  ExpectFailure(with("palu:hi_bit=9"), 2, "hi_bit=9");
  ExpectFailure(with("palu:hi_bit=2,lo_bit=4"), 2, "lo_bit=4");
  ExpectFailure(with("palu:group_size=33"), 2, "group_size=33");
  ExpectFailure(with("palu:no_such_preset"), 2, "no_such_preset");
  ExpectFailure(with("palu:rank=33"), 2, "head_dim");  // only the model tells
  ExpectFailure(with("llama:f17"), 2, "f17");
  Invocation target;
  target.arguments = RunWith({"-p", "x"});
  target.environment = {{"PALU_TARGET", "Z80"}};
  ExpectFailure(Palu(target), 2, "Z80");
}

TEST_F(Cli, BadFilesExitWithOne) {
  folder_->Put("latin1", "caf\xE9");
  folder_->Put("empty", "");
  folder_->Put("foreign.gguf", "this is no model");
  folder_->Put("short.gguf", folder_->Get("chat.gguf").substr(0, 20000));
  const auto with_model = [](const std::string& path) {
    return Palu({"run", "-t", "1", "-m", path, "-p", "x"});
  };
  ExpectFailure(with_model(Path("missing.gguf")), 1, "missing.gguf");
  ExpectFailure(with_model(Path("empty")), 1, "empty");
  ExpectFailure(with_model(Path("foreign.gguf")), 1, "foreign.gguf");
  ExpectFailure(with_model(Path("short.gguf")), 1, "short.gguf");
  ExpectFailure(Palu(RunWith({"-f", Path("missing")})), 1, "missing: No such file");
  ExpectFailure(Palu(RunWith({"-f", Path("latin1")})), 1, "not UTF-8: byte 0xE9 at offset 3");
  ExpectFailure(Palu(RunWith({"-p", "caf\xE9"})), 1, "not UTF-8");
  ExpectFailure(Palu(RunWith({"-f", Path("empty")})), 1, "the prompt is empty");
  ExpectFailure(Palu(RunWith({"-f", "-"})), 1, "the prompt is empty");
  ExpectFailure(Palu({"inspect", "-t", "1", "-m", Model(), "-f", Path("empty")}), 1, "is empty");
}

TEST_F(Cli, OutputFilesAreTriedBeforeTheModelIsLoaded) {
  const std::string path = Path("no/such/folder/out");
  // A missing model would be the next complaint.
  const std::string model = Path("missing.gguf");
  ExpectFailure(Palu({"run", "-m", model, "-p", "x", "--json", path}), 1, "cannot write " + path);
  for (const char* option : {"--json", "--svg"}) {
    ExpectFailure(Palu({"inspect", "-t", "1", "-m", model, "-f", Path("text"), option, path}), 1,
                  "cannot write " + path);
  }
}

TEST_F(Cli, WhatDoesNotFitIsRefusedBeforeThePrompt) {
  ExpectFailure(Palu(RunWith({"-f", Path("text"), "--kv-memory", "1K"})), 1, "--kv-memory allows");
  ExpectFailure(Palu(RunWith({"-f", Path("text"), "--ctx", "500"})), 1, "--ctx allows 500");
}

TEST_F(Cli, AFullDiskIsReported) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  const Outcome json = Palu(RunWith({"-p", "x", "-n", "2", "--json", "/dev/full"}));
  EXPECT_EQ(json.code, 1);
  EXPECT_NE(json.err.find("palu: error: cannot write /dev/full: No space left"), std::string::npos)
      << json.err;
  Invocation full;
  full.arguments = RunWith({"-p", "x", "-n", "20", "--ignore-eos"});
  full.out_file = "/dev/full";
  ExpectFailure(Palu(full), 1, "cannot write standard output: No space left");
}

TEST_F(Cli, AnswersOnStandardOutputAndReportsInJson) {
  const std::string cache = "palu:bits=auto:4";
  const Outcome outcome = Palu(RunWith({"-f", Path("text"), "-p", "And then?", "-n", "40", "-c",
                                        cache, "--ignore-eos", "--json", Path("run.json")}));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const nlohmann::json json = Json("run.json");
  EXPECT_EQ(json.at("generated_tokens"), 40);
  const std::string text = json.at("text");
  EXPECT_EQ(outcome.out, text.ends_with('\n') ? text : text + "\n");
  EXPECT_EQ(FindInvalidUtf8(outcome.out), std::string::npos);
  // One token per byte, BOS, and the template around both texts.
  const std::string prompt = "<|im_start|>user\n" + folder_->Get("text") +
                             "\n\nAnd then?<|im_end|>\n<|im_start|>assistant\n";
  EXPECT_EQ(json.at("prompt_tokens"), prompt.size() + 1);
  EXPECT_EQ(json.at("cache").get<std::string>().rfind("palu", 0), 0u);
  EXPECT_EQ(json.at("rank_k").size(), 3u);
  EXPECT_EQ(json.at("rank_v").size(), 3u);
  EXPECT_GT(json.at("rank_k")[0], 0);
  EXPECT_GT(json.at("prompt_tok_s"), 0);
  EXPECT_GT(json.at("decode_tok_s"), 0);
  EXPECT_GT(json.at("peak_rss_bytes"), 1 << 20);
  EXPECT_GT(json.at("stored_bits_per_element"), json.at("advertised_bits_per_element"));
  EXPECT_LT(json.at("kv_bytes"), json.at("kv_fp16_bytes"));
  // Not on a terminal: no progress bar, no escape sequence.
  EXPECT_EQ(outcome.err.find('\r'), std::string::npos);
  EXPECT_EQ(outcome.err.find('\x1b'), std::string::npos);
  EXPECT_NE(outcome.err.find("KV allocated"), std::string::npos);
}

TEST_F(Cli, CachesDifferInBytesNotInTokens) {
  const auto json = [](const std::string& cache) {
    const Outcome outcome = Palu(RunWith({"-f", Path("text"), "-n", "4", "--ignore-eos", "-c",
                                          cache, "--json", Path("cache.json")}));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return Json("cache.json");
  };
  const nlohmann::json fp16 = json("fp16"), palu = json("palu"), own = json("llama:f16");
  EXPECT_EQ(fp16.at("prompt_tokens"), palu.at("prompt_tokens"));
  EXPECT_EQ(fp16.at("kv_fp16_bytes"), palu.at("kv_fp16_bytes"));
  EXPECT_EQ(fp16.at("kv_fp16_bytes"), own.at("kv_fp16_bytes"));
  EXPECT_GE(fp16.at("kv_bytes"), fp16.at("kv_fp16_bytes"));
  EXPECT_LT(palu.at("kv_bytes").get<double>(), 0.7 * fp16.at("kv_bytes").get<double>());
  EXPECT_EQ(own.at("rank_k").size(), 0u);
}

TEST_F(Cli, RunsAreReproducible) {
  const auto text = [](Words more) {
    more.insert(more.begin(), {"-p", "Once", "-n", "30", "--ignore-eos"});
    const Outcome outcome = Palu(RunWith(more));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out;
  };
  EXPECT_EQ(text({}), text({}));
  EXPECT_EQ(text({"--temp", "1", "--seed", "5"}), text({"--temp", "1", "--seed", "5"}));
  EXPECT_NE(text({"--temp", "1", "--seed", "5"}), text({"--temp", "1", "--seed", "6"}));
}

TEST_F(Cli, AOneTokenPromptWorks) {
  const Outcome outcome = Palu({"run", "-t", "1", "-m", RawModel(), "--raw", "-p", "a", "-n", "3",
                                "--ignore-eos", "--json", Path("one.json")});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(Json("one.json").at("prompt_tokens"), 2);  // and BOS
  EXPECT_NE(outcome.err.find("not fitted yet"), std::string::npos) << outcome.err;
}

TEST_F(Cli, RawLeavesTheTemplateOut) {
  const auto tokens = [](const std::string& model, Words more) {
    Words words = {"run",   "-t", "1", "-m",     model,           "-p",
                   "abcde", "-n", "0", "--json", Path("raw.json")};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = Palu(words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    return Json("raw.json").at("prompt_tokens").get<int>();
  };
  EXPECT_EQ(tokens(Model(), {"--raw"}), 6);
  EXPECT_EQ(tokens(RawModel(), {}), 6);  // no template to apply
  EXPECT_EQ(tokens(Model(), {}), 6 + 17 + 33);
  EXPECT_EQ(tokens(Model(), {"--system", "xyz"}), 6 + 17 + 33 + 3 + 30);
}

TEST_F(Cli, CtrlCStopsTheAnswerAndStillReports) {
  bool sent = false;
  Invocation call;
  call.arguments = RunWith(
      {"-p", "x", "-n", "1000000", "--ctx", "2000000", "--ignore-eos", "--json", Path("int.json")});
  call.watch = [&sent](pid_t id, const std::string& out) {
    if (!sent && !out.empty()) sent = kill(id, SIGINT) == 0;
  };
  const Outcome outcome = Palu(call);
  EXPECT_EQ(outcome.code, 130) << outcome.err;
  const nlohmann::json json = Json("int.json");
  EXPECT_EQ(json.at("stop"), "interrupted");
  EXPECT_GT(json.at("generated_tokens"), 0);
  EXPECT_NE(outcome.err.find("KV allocated"), std::string::npos) << outcome.err;
}

TEST_F(Cli, ChatDecodesOnlyWhatIsNew) {
  const Outcome outcome =
      Palu(RunWith({"-i", "-n", "6", "--ignore-eos"}), "first\n/stats\n\nsecond\n/stats\n");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto prompt_tokens = [&](size_t from, size_t* end) {
    const size_t at = outcome.err.find("tokens        ", from);
    EXPECT_NE(at, std::string::npos) << outcome.err;
    *end = at + 1;
    return std::stoi(outcome.err.substr(at + 14));
  };
  size_t at = 0;
  const int first = prompt_tokens(0, &at), both = prompt_tokens(at, &at);
  const std::string turn = "<|im_start|>user\nfirst<|im_end|>\n<|im_start|>assistant\n";
  EXPECT_EQ(first, 1 + static_cast<int>(turn.size()));
  // The last token of the answer, the end of its turn, and the second turn.
  const std::string next =
      "<|im_end|>\n<|im_start|>user\nsecond<|im_end|>\n<|im_start|>assistant\n";
  EXPECT_EQ(both, first + 1 + static_cast<int>(next.size()));
}

TEST_F(Cli, ChatCommandsAndMistakesDoNotEndIt) {
  const Outcome outcome = Palu(RunWith({"-i", "-n", "2"}),
                               "/nonsense\nbad \xE9\n/clear\n/help\nhello\n/exit\nnever read\n");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_NE(outcome.err.find("/nonsense"), std::string::npos);
  EXPECT_NE(outcome.err.find("palu: error: the line is not UTF-8"), std::string::npos);
  EXPECT_NE(outcome.err.find("(cleared)"), std::string::npos);
  EXPECT_NE(outcome.err.find("/stats"), std::string::npos);
  EXPECT_FALSE(outcome.out.empty());
}

TEST_F(Cli, ChatGoesOnAfterALineThatDoesNotFit) {
  const std::string too_long(3000, 'a');
  const Outcome outcome = Palu(RunWith({"-i", "-n", "2", "--ctx", "400", "--ignore-eos"}),
                               "hello\n" + too_long + "\nagain\n/stats\n");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_NE(outcome.err.find("palu: error: the run reaches"), std::string::npos) << outcome.err;
  EXPECT_NE(outcome.err.find("4 messages"), std::string::npos) << outcome.err;
}

TEST_F(Cli, ATerminalSeesProgressThatGoesAway) {
  if (!HasTerminals()) GTEST_SKIP() << "no pseudo-terminals here: /dev/pts is not mounted";
  const Outcome outcome =
      PaluOnTerminal(RunWith({"-f", Path("text"), "-n", "2", "--ignore-eos"}), {});
  EXPECT_EQ(outcome.code, 0) << outcome.out;
  const size_t bar = outcome.out.find("prompt [....");
  ASSERT_NE(bar, std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("\r\x1b[K", bar), std::string::npos);  // wiped
  EXPECT_EQ(outcome.out.find("prompt [", outcome.out.find("KV allocated")), std::string::npos);
}

TEST_F(Cli, CtrlCInAChatStopsTheAnswerThenTheProgram) {
  if (!HasTerminals()) GTEST_SKIP() << "no pseudo-terminals here: /dev/pts is not mounted";
  const std::string ctrl_c = "\x03";
  // The whole prompt is done when the bar is full; the answer would take ten million tokens.
  const Outcome outcome = PaluOnTerminal(
      RunWith({"-i", "-p", "hello", "-n", "10000000", "--ignore-eos"}),
      {{"###", ctrl_c}, {"> ", "/stats\n"}, {"kernels", ctrl_c}, {"Ctrl-C again", ctrl_c}});
  EXPECT_EQ(outcome.code, 130) << outcome.out;
  EXPECT_NE(outcome.out.find("KV allocated"), std::string::npos) << outcome.out;
}

TEST_F(Cli, CtrlDLeavesAChat) {
  if (!HasTerminals()) GTEST_SKIP() << "no pseudo-terminals here: /dev/pts is not mounted";
  const Outcome outcome = PaluOnTerminal(RunWith({"-i"}), {{"> ", "\x04"}});
  EXPECT_EQ(outcome.code, 0) << outcome.out;
}

TEST_F(Cli, InspectWritesTableJsonAndPlot) {
  const Outcome outcome =
      Palu({"inspect", "-t", "1", "-m", Model(), "-f", Path("text"), "--max-tokens", "300",
            "--json", Path("spectra.json"), "--svg", Path("spectra.svg")});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("300 tokens"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("median"), std::string::npos);
  const nlohmann::json json = Json("spectra.json");
  ASSERT_EQ(json.at("layers").size(), 3u);
  ASSERT_EQ(json.at("layers")[0].at("groups").size(), 2u);  // the model has two KV heads
  for (const char* side : {"key_cached", "key_averaged", "value"}) {
    const nlohmann::json& spectrum = json.at("layers")[2].at("groups")[1].at(side);
    EXPECT_EQ(spectrum.at("rows"), 300);
    EXPECT_EQ(spectrum.at("sigma").size(), 32u);
    EXPECT_GT(spectrum.at("sigma")[0], 0);
    EXPECT_LE(spectrum.at("rank").at("sum").at("80"), spectrum.at("rank").at("sum").at("99"));
  }
  // Rotation moves the keys of different positions apart, so that their spectra differ.
  EXPECT_NE(json.at("layers")[0].at("groups")[0].at("key_cached").at("sigma"),
            json.at("layers")[0].at("groups")[0].at("key_averaged").at("sigma"));
  EXPECT_EQ(folder_->Get("spectra.svg").rfind("<svg", 0), 0u);
}

TEST_F(Cli, MethodsListsMethodsOptionsAndKernels) {
  const Outcome outcome = Palu({"methods"});
  EXPECT_EQ(outcome.code, 0);
  for (const char* part :
       {"fp16", "palu", "reference", "hi_bit", "fit_tokens", "kernels: ", "llama:"}) {
    EXPECT_NE(outcome.out.find(part), std::string::npos) << part;
  }
}

}  // namespace
}  // namespace palu::app
