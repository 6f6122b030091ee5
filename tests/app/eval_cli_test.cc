// `palu eval` from the outside, with a small random model.
#include <gguf.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "eval/sha256.h"
#include "expect_failure.h"
#include "program.h"
#include "text_model.h"

namespace palu::app {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

class EvalCli : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TempFolder;
    WriteTextModel(Path("model.gguf"), false);
    std::string text;
    for (int i = 0; text.size() < 40000; ++i) text += "Line " + std::to_string(i * 7919) + ". ";
    folder_->Put("text", text);
  }
  static void TearDownTestSuite() { delete folder_; }

  void SetUp() override {
    for (const char* name : {"out.json", "out.json.part"}) fs::remove(Path(name));
  }

  static std::string Path(const std::string& name) { return folder_->Path(name); }
  static Words EvalWith(Words more) {
    Words words = {"eval", "-t", "1", "-m", Path("model.gguf"), "-f", Path("text")};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  static nlohmann::json Json(const std::string& name = "out.json") {
    return nlohmann::json::parse(folder_->Get(name));
  }
  static const nlohmann::json& Row(const nlohmann::json& json, const std::string& cache) {
    for (const nlohmann::json& row : json.at("results")) {
      if (row.at("cache") == cache) return row;
    }
    throw std::runtime_error("no row " + cache);
  }

  static TempFolder* folder_;
};

TempFolder* EvalCli::folder_ = nullptr;

TEST_F(EvalCli, MeasuresEveryCacheOnTheSameTokens) {
  const Outcome outcome = Palu(
      EvalWith({"--ctx", "512", "--chunks", "2", "--cache", "fp16", "--cache", "fp32", "--cache",
                "palu:bits=auto:2", "--cache", "llama:q8_0", "--json", Path("out.json")}));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const nlohmann::json json = Json();
  EXPECT_EQ(json.at("model"), "model.gguf");
  EXPECT_EQ(json.at("model_sha256"), Sha256OfFile(Path("model.gguf")));
  EXPECT_EQ(json.at("text_sha256"), Sha256OfFile(Path("text")));
  EXPECT_EQ(json.at("ctx"), 512);
  EXPECT_EQ(json.at("chunks"), 2);
  EXPECT_EQ(json.at("batch"), 64);
  EXPECT_EQ(json.at("mode"), "batch");
  EXPECT_EQ(json.at("threads"), 1);
  ASSERT_EQ(json.at("results").size(), 4u);
  const auto &exact = Row(json, "fp32"), &packed = Row(json, "palu:bits=auto:2"),
             &theirs = Row(json, "llama:q8_0");
  // Packed further is further away, and smaller.
  EXPECT_LT(exact.at("kl_mean"), 1e-4);
  EXPECT_GT(packed.at("kl_mean"), 10 * exact.at("kl_mean").get<double>());
  EXPECT_GT(packed.at("kl_p999"), packed.at("kl_median"));
  EXPECT_GT(packed.at("kl_mean_se"), 0);
  EXPECT_LT(packed.at("stored_bits_per_element"), exact.at("stored_bits_per_element"));
  EXPECT_LT(packed.at("stored_bits_at_32k"), packed.at("stored_bits_per_element"));
  EXPECT_GT(packed.at("stored_bits_at_32k"), packed.at("code_bits"));
  EXPECT_EQ(exact.at("exact_tokens"), 511);
  EXPECT_LT(packed.at("exact_tokens"), 200);
  EXPECT_EQ(theirs.at("code_bits"), 8.5);
  EXPECT_EQ(theirs.at("stored_bits_at_32k"), 8.5);
  for (const nlohmann::json& row : json.at("results")) {
    // Random weights: about as good as guessing one of 320 tokens.
    EXPECT_GT(row.at("ppl"), 50);
    EXPECT_LT(row.at("top1"), 1.0 + 1e-9);
    EXPECT_GT(row.at("prompt_tok_s"), 0);
    EXPECT_GT(row.at("decode_tok_s"), 0);
    EXPECT_NE(outcome.out.find(row.at("cache").get<std::string>()), std::string::npos);
  }
}

TEST_F(EvalCli, TheRowOfTheReferenceItselfIsANoiseFloor) {
  for (const char* batch : {"64", "1"}) {
    const Outcome outcome =
        Palu(EvalWith({"--ctx", "256", "--chunks", "1", "--batch", batch, "--cache", "fp16",
                       "--cache", "fp32", "--json", Path("floor.json")}));
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const double floor = Row(Json("floor.json"), "fp16").at("kl_p999");
    EXPECT_GT(floor, 0) << "equal bits: the row says nothing about noise";
    EXPECT_LT(floor, 1e-4);
    fs::remove(Path("floor.json.part"));
  }
}

TEST_F(EvalCli, ASecondRunMeasuresOnlyWhatIsMissing) {
  const Words first = {"--ctx",   "256",  "--chunks", "2",
                       "--cache", "fp32", "--json",   Path("out.json")};
  ASSERT_EQ(Palu(EvalWith(first)).code, 0);
  const nlohmann::json before = Json();
  // Nothing is missing: every figure comes back, speeds too.
  const Outcome again = Palu(EvalWith(first));
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_NE(again.err.find("2 of 2 cells (cache x chunk) were measured before, 0 to do"),
            std::string::npos)
      << again.err;
  EXPECT_EQ(Json(), before);
  // A cache and a chunk more.
  const Outcome more = Palu(EvalWith({"--ctx", "256", "--chunks", "3", "--cache", "fp32", "--cache",
                                      "llama:q4_0", "--json", Path("out.json")}));
  EXPECT_EQ(more.code, 0) << more.err;
  EXPECT_NE(more.err.find("2 of 6 cells (cache x chunk) were measured before, 4 to do"),
            std::string::npos)
      << more.err;
  EXPECT_EQ(Json().at("chunks"), 3);
  // As if it had been measured at once.
  ASSERT_EQ(Palu(EvalWith({"--ctx", "256", "--chunks", "3", "--cache", "fp32", "--cache",
                           "llama:q4_0", "--json", Path("once.json")}))
                .code,
            0);
  for (const char* cache : {"fp32", "llama:q4_0"}) {
    for (const char* figure : {"kl_mean", "kl_mean_se", "kl_p999", "ppl", "ppl_diff", "top1"}) {
      EXPECT_EQ(Row(Json(), cache).at(figure), Row(Json("once.json"), cache).at(figure)) << figure;
    }
  }
}

TEST_F(EvalCli, CellsOfAnotherSettingAreRefused) {
  ASSERT_EQ(Palu(EvalWith({"--ctx", "128", "--chunks", "1", "--cache", "fp32", "--json",
                           Path("out.json")}))
                .code,
            0);
  ExpectFailure(Palu(EvalWith({"--ctx", "256", "--chunks", "1", "--cache", "fp32", "--json",
                               Path("out.json")})),
                1, "ctx is 128 there and 256 here; delete it or choose another --json");
  folder_->Put("out.json.part", folder_->Get("out.json.part").substr(0, 1000));
  ExpectFailure(Palu(EvalWith({"--ctx", "128", "--chunks", "1", "--cache", "fp32", "--json",
                               Path("out.json")})),
                1, "out.json.part is damaged");
}

TEST_F(EvalCli, CtrlCKeepsAndPrintsWhatIsFinished) {
  bool sent = false;
  Invocation call;
  call.arguments = EvalWith({"--ctx", "256", "--chunks", "150", "--cache", "fp32", "--cache",
                             "palu", "--json", Path("out.json")});
  call.watch = [&](pid_t id, const std::string&) {
    if (!sent && fs::exists(Path("out.json.part"))) sent = kill(id, SIGINT) == 0;
  };
  const Outcome stopped = Palu(call);
  EXPECT_EQ(stopped.code, 130) << stopped.err;
  const nlohmann::json json = Json();
  const int chunks = json.at("chunks");
  EXPECT_GE(chunks, 1);
  EXPECT_LT(chunks, 150);
  EXPECT_NE(stopped.out.find("palu"), std::string::npos) << stopped.out;
  EXPECT_NE(stopped.err.find("chunks are finished for all rows"), std::string::npos) << stopped.err;
  // Asked for no more than that, the same command has nothing to do.
  const Outcome again =
      Palu(EvalWith({"--ctx", "256", "--chunks", std::to_string(chunks), "--cache", "fp32",
                     "--cache", "palu", "--json", Path("out.json")}));
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_NE(again.err.find(" 0 to do"), std::string::npos) << again.err;
  EXPECT_EQ(Json(), json);
}

TEST_F(EvalCli, BadInputIsRefusedBeforeAnyWork) {
  ExpectFailure(Palu(EvalWith({"--ctx", "65536", "--cache", "fp32"})), 1,
                "one chunk of --ctx 65536 needs 65535");
  ExpectFailure(Palu(EvalWith({"--cache", "palo"})), 2, "palo");
  ExpectFailure(Palu(EvalWith({"--ctx", "128", "--cache", "llama:f17"})), 2, "f17");
  ExpectFailure(Palu(EvalWith({"--ctx", "10", "--cache", "fp32"})), 2, "--ctx");
  ExpectFailure(Palu(EvalWith({})), 2, "--cache is required");
  ExpectFailure(Palu(EvalWith({"--chunks", "0", "--cache", "palu"})), 2, "nothing to measure");
  ExpectFailure(Palu(EvalWith({"--needle-ctx", "5", "--needle", "--cache", "palu"})), 2,
                "--needle-ctx");
  ExpectFailure(
      Palu(EvalWith({"--chunks", "0", "--needle", "--needle-ctx", "90000", "--cache", "palu"})), 1,
      "--needle-ctx 90000 needs");
  const std::string path = Path("no/such/folder/out");
  // A missing model would be the next complaint.
  for (const char* option : {"--json", "--html"}) {
    ExpectFailure(Palu({"eval", "-m", Path("missing.gguf"), "-f", Path("text"), "--cache", "fp32",
                        option, path}),
                  1, "cannot write " + path);
  }
}

TEST_F(EvalCli, DecodeModeScoresTokenByToken) {
  const auto measure = [&](Words more) {
    more.insert(more.begin(), {"--ctx", "400", "--chunks", "1", "--cache", "palu:bits=auto:2",
                               "--json", Path("mode.json")});
    const Outcome outcome = Palu(EvalWith(more));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    fs::remove(Path("mode.json.part"));
    return Json("mode.json");
  };
  const nlohmann::json decode = measure({"--mode", "decode"});
  EXPECT_EQ(decode.at("mode"), "decode");
  EXPECT_EQ(decode.at("batch"), 1);
  // A batch sees its own tokens exactly, a single token does not see more than the window.
  const nlohmann::json one = measure({"--batch", "1"}), many = measure({"--batch", "200"});
  EXPECT_EQ(Row(decode, "palu:bits=auto:2").at("kl_mean"),
            Row(one, "palu:bits=auto:2").at("kl_mean"));
  EXPECT_GT(Row(decode, "palu:bits=auto:2").at("kl_mean"),
            Row(many, "palu:bits=auto:2").at("kl_mean"));
  ExpectFailure(Palu(EvalWith({"--mode", "decode", "--batch", "64", "--cache", "palu"})), 2,
                "--mode decode");
  ExpectFailure(Palu(EvalWith({"--mode", "backwards", "--cache", "palu"})), 2, "backwards");
}

TEST_F(EvalCli, ExpandsTheWeightsIntoAFileThatGoesAway) {
  fs::create_directory(Path("tmp"));
  Invocation call;
  call.arguments = EvalWith({"--ctx", "256", "--chunks", "1", "--weights", "f32", "--cache", "fp32",
                             "--json", Path("out.json")});
  call.environment = {{"TMPDIR", Path("tmp")}};
  const Outcome outcome = Palu(call);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(fs::is_empty(Path("tmp")));
  EXPECT_EQ(Json().at("weights"), "f32");
  EXPECT_EQ(Json().at("model"), "model.gguf");
  EXPECT_EQ(Json().at("model_sha256"), Sha256OfFile(Path("model.gguf")));
  // Cells of the file's own weights are others.
  call.arguments =
      EvalWith({"--ctx", "256", "--chunks", "1", "--cache", "fp32", "--json", Path("out.json")});
  ExpectFailure(Palu(call), 1, "weights is \"f32\" there and \"file\" here");
  call.arguments = EvalWith({"--weights", "f32", "--cache", "fp32"});
  call.environment = {{"TMPDIR", Path("missing")}};
  ExpectFailure(Palu(call), 1, "TMPDIR");
}

TEST_F(EvalCli, AsksForPassKeysAndResumes) {
  const Words needle = {"--chunks", "0",       "--needle",      "--needle-ctx",
                        "300,512",  "--cache", "fp16",          "--cache",
                        "palu",     "--json",  Path("out.json")};
  const Outcome outcome = Palu(EvalWith(needle));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  const nlohmann::json json = Json();
  EXPECT_EQ(json.at("results").size(), 0u);
  EXPECT_EQ(json.at("needle").at("contexts"), nlohmann::json({300, 512}));
  ASSERT_EQ(json.at("needle").at("results").size(), 2u);
  const nlohmann::json& row = json.at("needle").at("results")[1];
  EXPECT_EQ(row.at("cache"), "palu");
  EXPECT_EQ(row.at("of"), 10);
  EXPECT_EQ(row.at("right"), 0);  // random weights
  EXPECT_EQ(row.at("contexts")[1].at("depths")[4].at("depth"), 100);
  EXPECT_EQ(row.at("contexts")[1].at("depths")[4].at("key").get<std::string>().size(), 5u);
  EXPECT_NE(outcome.out.find("0/10"), std::string::npos) << outcome.out;
  // Answers are kept: a second run asks nothing.
  const std::string part = folder_->Get("out.json.part");
  EXPECT_EQ(Palu(EvalWith(needle)).out, outcome.out);
  EXPECT_EQ(folder_->Get("out.json.part"), part);
}

TEST_F(EvalCli, ComparesWhatIsWrittenGreedily) {
  const auto greedy = [&](Words more) {
    more.insert(more.end(), {"--ctx", "800", "--chunks", "0", "--cache", "fp16", "--cache", "fp32",
                             "--cache", "palu:bits=auto:1", "--json", Path("out.json")});
    return Palu(EvalWith(more));
  };
  const Outcome outcome = greedy({"--greedy", "3"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const nlohmann::json json = Json().at("greedy");
  EXPECT_EQ(json.at("prompts"), 3);
  EXPECT_EQ(json.at("prompt_tokens"), 400);
  EXPECT_EQ(json.at("tokens"), 128);
  const nlohmann::json &exact = json.at("results")[1], &packed = json.at("results")[2];
  EXPECT_EQ(exact.at("prompts"), 3);
  EXPECT_GT(exact.at("agreement"), packed.at("agreement"));
  EXPECT_LE(exact.at("agreement"), exact.at("same_position"));
  EXPECT_LT(packed.at("undiverged"), 3);
  EXPECT_NEAR(packed.at("mean_length").get<double>() / 128, packed.at("agreement"), 1e-12);
  EXPECT_NE(outcome.out.find("greedy agreement"), std::string::npos) << outcome.out;
  // Kept, too.
  const Outcome again = greedy({"--greedy", "3"});
  EXPECT_EQ(again.out, outcome.out);
  EXPECT_EQ(Json().at("greedy"), json);
}

TEST_F(EvalCli, GreedyWithoutANumberTakesTwentyPrompts) {
  const Outcome outcome = Palu(EvalWith(
      {"--ctx", "64", "--chunks", "0", "--cache", "fp32", "--greedy", "--json", Path("out.json")}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(Json().at("greedy").at("results")[0].at("prompts"), 20);
}

TEST_F(EvalCli, WritesAPageThatNeedsNothingElse) {
  const Outcome outcome = Palu(EvalWith({"--ctx", "256", "--chunks", "1", "--cache", "fp16",
                                         "--cache", "llama:q4_0", "--html", Path("out.html")}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::string html = folder_->Get("out.html");
  for (const char* part :
       {"<!doctype html>", "llama:q4_0: ", "noise floor", "Spectra of K and V", "sha256 ",
        "palu eval -m model.gguf -f text --ctx 256 --chunks 1 -t 1 --cache fp16 --cache "
        "llama:q4_0"}) {
    EXPECT_NE(html.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(html.find(Path("")), std::string::npos) << "a folder of this machine";
  EXPECT_FALSE(fs::exists(Path("out.html.part")));
}

TEST_F(EvalCli, AModelWithoutBosGetsWholeChunksOfText) {
  WriteTextModel(Path("no_bos.gguf"), false, /*bos=*/false);
  folder_->Put("exact", folder_->Get("text").substr(0, 512));
  const auto run = [&](const std::string& model) {
    return Palu({"eval", "-t", "1", "-m", Path(model), "-f", Path("exact"), "--ctx", "256",
                 "--chunks", "2", "--cache", "palu", "--json", Path("bos.json")});
  };
  // One token per byte: exactly two chunks; with BOS they would have room to spare.
  const Outcome without = run("no_bos.gguf");
  EXPECT_EQ(without.code, 0) << without.err;
  EXPECT_EQ(without.err, "");
  EXPECT_EQ(Json("bos.json").at("chunks"), 2);
  fs::remove(Path("bos.json.part"));
  folder_->Put("exact", folder_->Get("text").substr(0, 511));
  const Outcome shorter = run("no_bos.gguf");
  EXPECT_NE(shorter.err.find("has 1 chunks of 256 tokens, fewer than the 2 of --chunks"),
            std::string::npos)
      << shorter.err;
  fs::remove(Path("bos.json.part"));
  EXPECT_EQ(run("model.gguf").err, "");
}

// Overwrites floats of a tensor in a GGUF file.
void Overwrite(const std::string& path, const char* tensor, int64_t first,
               std::vector<float> values) {
  const std::unique_ptr<gguf_context, decltype(&gguf_free)> gguf(
      gguf_init_from_file(path.c_str(), {.no_alloc = true, .ctx = nullptr}), gguf_free);
  const int64_t id = gguf_find_tensor(gguf.get(), tensor);
  ASSERT_GE(id, 0) << tensor;
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(gguf_get_data_offset(gguf.get()) +
                                         gguf_get_tensor_offset(gguf.get(), id) +
                                         first * sizeof(float)));
  file.write(reinterpret_cast<const char*>(values.data()),
             static_cast<std::streamsize>(values.size() * sizeof(float)));
}

TEST_F(EvalCli, LogitsThatAreNoNumbersNameCacheAndToken) {
  // A model whose last feed-forward overflows for the byte 'z' alone: its embedding stands out in
  // one dimension, which a huge weight then takes beyond float. Keys and values stay finite, and
  // the self-test, which is without that byte, passes.
  WriteTextModel(Path("nan.gguf"), false);
  constexpr int64_t kEmbedding = 128, kToken = 3 + 'z';
  std::vector<float> row(kEmbedding, 0);
  row[0] = 1e6f;
  Overwrite(Path("nan.gguf"), "token_embd.weight", kToken * kEmbedding, row);
  row[0] = 4e37f;
  Overwrite(Path("nan.gguf"), "blk.2.ffn_gate.weight", 0, row);
  row[0] = 1e-37f;
  Overwrite(Path("nan.gguf"), "blk.2.ffn_up.weight", 0, row);
  // BOS comes first, so the byte at 199 is token 200 of its chunk, in the scored half.
  folder_->Put("with_z", std::string(199, 'a') + "z" + std::string(100, 'a'));
  ExpectFailure(Palu({"eval", "-t", "1", "-m", Path("nan.gguf"), "-f", Path("with_z"), "--ctx",
                      "256", "--chunks", "1", "--cache", "palu"}),
                1, "cache fp16, chunk 1: the logits of token 200 are NaN or infinite");
}

TEST_F(EvalCli, AModelWhoseLogitsAreNeverNumbersIsRefusedAtOnce) {
  WriteTextModel(Path("nan.gguf"), false);
  Overwrite(Path("nan.gguf"), "output.weight", 0, {std::numeric_limits<float>::quiet_NaN()});
  ExpectFailure(Palu({"eval", "-t", "1", "-m", Path("nan.gguf"), "-f", Path("text"), "--ctx", "256",
                      "--chunks", "1", "--cache", "palu"}),
                1, "cannot be run: the logits");
}

TEST_F(EvalCli, KeysThatAreNoNumbersNameCacheAndChunk) {
  WriteTextModel(Path("nan.gguf"), false);
  // The embedding of the byte 'z', which comes in the second chunk.
  constexpr int64_t kEmbedding = 128, kToken = 3 + 'z';
  Overwrite(Path("nan.gguf"), "token_embd.weight", kToken * kEmbedding,
            {std::numeric_limits<float>::quiet_NaN()});
  folder_->Put("with_z", folder_->Get("text").substr(0, 300) + "z" + std::string(400, 'a'));
  const Outcome outcome =
      Palu({"eval", "-t", "1", "-m", Path("nan.gguf"), "-f", Path("with_z"), "--ctx", "256",
            "--chunks", "2", "--cache", "palu", "--json", Path("out.json")});
  ExpectFailure(outcome, 1, "cache fp16, chunk 2: ");
  // The first chunk is kept.
  EXPECT_TRUE(fs::exists(Path("out.json.part")));
}

TEST_F(EvalCli, APartFileThatCannotBeWrittenIsFoundBeforeAnyWork) {
  fs::create_directory(Path("out.json.part"));
  ExpectFailure(Palu({"eval", "-m", Path("missing.gguf"), "-f", Path("text"), "--cache", "fp32",
                      "--json", Path("out.json")}),
                1, "cannot write " + Path("out.json.part"));
}

TEST_F(EvalCli, ADeviceAsJsonFileHasNoPartFile) {
  const Outcome outcome =
      Palu(EvalWith({"--ctx", "128", "--chunks", "1", "--cache", "fp32", "--json", "/dev/null"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_FALSE(fs::exists("/dev/null.part"));
}

TEST_F(EvalCli, TheSameCacheTwiceIsOneRow) {
  const Outcome outcome =
      Palu(EvalWith({"--ctx", "128", "--chunks", "1", "--cache", "palu", "--cache",
                     "palu:sink_tokens=4", "--json", Path("out.json")}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(Json().at("results").size(), 1u);
  EXPECT_NE(outcome.err.find("--cache palu:sink_tokens=4 means the same as palu"),
            std::string::npos)
      << outcome.err;
}

}  // namespace
}  // namespace palu::app
