// The verb `check-plugin`: its answers about programs that play a part, and about llama.cpp's own.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "check/llama_options.h"
#include "check/plugin_events.h"
#include "check/verdict.h"
#include "expect_failure.h"
#include "program.h"
#include "random_model.h"
#include "text_model.h"

namespace palu::app {
namespace {

using Words = std::vector<std::string>;

// ---- parts

constexpr char kLoaded[] =
    "loaded palu 0.1.0, PALU_CACHE=palu:rank=32,hi_bit=4, kernel AVX2, ggml 0.25.3 of generation "
    "2026-08 (ggml 0.20 to 0.25)\n";

TEST(PluginEvents, AreReadUpToTheLastWholeLine) {
  const PluginEvents events = ParsePluginEvents(
      std::string(kLoaded) +
      "reserved 5 layers\n\nnews of another version\nreserved 25 layers\n"
      "cache KV cache of 5 layers, 1 x 512 cells: 4.41 bits per element when full, 90 bytes per "
      "token (f16: 320)\nus");
  EXPECT_TRUE(events.loaded);
  EXPECT_EQ(events.version, "palu 0.1.0");
  EXPECT_EQ(events.cache, "palu:rank=32,hi_bit=4");
  EXPECT_EQ(events.kernel, "AVX2");
  EXPECT_EQ(events.Layers(), 30);
  EXPECT_EQ(events.bits, Words{"4.41"});
  EXPECT_FALSE(events.used);
  EXPECT_EQ(events.refusal, "");
}

TEST(LlamaOptions, TheLastArgumentWinsOverTheFirstAndOverTheEnvironment) {
  setenv("LLAMA_ARG_DEVICE", "CUDA0", 1);
  setenv("LLAMA_ARG_N_GPU_LAYERS", "3", 1);
  const LlamaOptions from_environment = ReadLlamaOptions({"llama-server"});
  const LlamaOptions given = ReadLlamaOptions({"/opt/llama-server", "-ngl", "0", "--device", "none",
                                               "-dev", "CPU,PALU", "--gpu-layers", "7", "-m"});
  const LlamaOptions bench = ReadLlamaOptions({"llama-bench"});
  unsetenv("LLAMA_ARG_DEVICE");
  unsetenv("LLAMA_ARG_N_GPU_LAYERS");
  EXPECT_EQ(from_environment.device, "CUDA0");
  EXPECT_EQ(from_environment.gpu_layers, "3");
  EXPECT_FALSE(from_environment.NamesPalu());
  EXPECT_TRUE(given.NamesPalu());
  EXPECT_EQ(given.gpu_layers, "7");
  EXPECT_EQ(given.model, "");  // -m without a word after it
  EXPECT_EQ(bench.device, "") << "llama-bench does not read the variable";
}

TEST(LlamaOptions, KnowsWhatKeepsTheCacheFromDevices) {
  EXPECT_FALSE(ReadLlamaOptions({"llama-cli"}).keeps_cache_on_host);
  EXPECT_TRUE(ReadLlamaOptions({"llama-cli", "-kvo", "-nkvo"}).keeps_cache_on_host);
  EXPECT_FALSE(ReadLlamaOptions({"llama-cli", "-nkvo", "-kvo"}).keeps_cache_on_host);
  EXPECT_FALSE(ReadLlamaOptions({"llama-bench", "-nkvo", "0"}).keeps_cache_on_host);
  EXPECT_TRUE(ReadLlamaOptions({"llama-bench", "-nkvo", "1"}).keeps_cache_on_host);
  EXPECT_FALSE(ReadLlamaOptions({"./nkvo", "x"}).is_llama);
}

TEST(Verdict, ACacheThatWaitsForRequestsIsNoYes) {
  Observation seen;
  seen.program = "llama-server";
  seen.options.is_llama = true;
  seen.events = ParsePluginEvents(std::string(kLoaded) + "reserved 30 layers\n");
  seen.ending = Ending::kTime;
  seen.seconds = 7;
  EXPECT_FALSE(Judge(seen).yes);
  EXPECT_NE(Judge(seen).text.find("after 7 s no attention had run"), std::string::npos)
      << Judge(seen).text;
  EXPECT_NE(Judge(seen).text.find("--timeout"), std::string::npos);
  seen.options.warms_up = false;
  EXPECT_NE(Judge(seen).text.find("without --no-warmup"), std::string::npos) << Judge(seen).text;
}

TEST(Verdict, LayersElsewhereAreNoYes) {
  Observation seen;
  seen.options.is_llama = true;
  seen.options.gpu_layers = "13";
  seen.events = ParsePluginEvents(std::string(kLoaded) + "reserved 12 layers\nused yes\n");
  seen.ending = Ending::kUsed;
  EXPECT_TRUE(Judge(seen).yes) << "nobody knows how many the model has";
  seen.model_layers = 12;
  EXPECT_TRUE(Judge(seen).yes);
  seen.model_layers = 30;
  EXPECT_FALSE(Judge(seen).yes);
  EXPECT_NE(Judge(seen).text.find("only 12 of 30 layers"), std::string::npos) << Judge(seen).text;
  EXPECT_NE(Judge(seen).text.find("-ngl all instead of -ngl 13"), std::string::npos);
}

// ---- the program, and programs that play a part

class CheckPlugin : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name :
         {"GGML_BACKEND_PATH", "PALU_CACHE", "LLAMA_ARG_DEVICE", "LLAMA_ARG_N_GPU_LAYERS"}) {
      unsetenv(name);
    }
  }

  // A shell script that is called as `name`.
  std::string Script(const std::string& name, const std::string& text) {
    folder_.Put(name, "#!/bin/sh\n" + text + "\n");
    std::filesystem::permissions(folder_.Path(name), std::filesystem::perms::owner_all);
    return folder_.Path(name);
  }
  // With the plug-in and the device set as they should be, unless `environment` says otherwise.
  Outcome Check(const Words& command,
                std::vector<std::pair<std::string, std::string>> environment = {},
                const Words& options = {}) {
    Invocation call;
    call.arguments = {"check-plugin"};
    call.arguments.insert(call.arguments.end(), options.begin(), options.end());
    call.arguments.push_back("--");
    call.arguments.insert(call.arguments.end(), command.begin(), command.end());
    call.environment = {{"GGML_BACKEND_PATH", PALU_PLUGIN}, {"LLAMA_ARG_DEVICE", "PALU"}};
    call.environment.insert(call.environment.end(), environment.begin(), environment.end());
    return Palu(call);
  }
  static void ExpectNo(const Outcome& outcome, const std::string& part) {
    EXPECT_EQ(outcome.code, 1) << outcome.out << outcome.err;
    EXPECT_EQ(outcome.out.rfind("no: ", 0), 0u) << outcome.out << outcome.err;
    EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 1) << outcome.out;
    EXPECT_NE(outcome.out.find(part), std::string::npos)
        << "no '" << part << "' in " << outcome.out;
  }
  static void ExpectYes(const Outcome& outcome, const std::string& part) {
    EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
    EXPECT_EQ(outcome.out.rfind("yes: " + part, 0), 0u) << outcome.out << outcome.err;
    EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 1) << outcome.out;
    EXPECT_EQ(outcome.err, "");
  }
  // What the plug-in writes, as commands of a script.
  static std::string Tell(const std::string& lines) {
    return "cat >>\"$PALU_REPORT\" <<'END'\n" + lines + "END\n";
  }
  static std::string TellUsed() {
    return Tell(std::string(kLoaded) +
                "reserved 30 layers\ncache KV cache of 30 layers, 1 x 9 cells: 4.41 bits per "
                "element when full, 9 bytes per token (f16: 99)\nused yes\n");
  }

  TempFolder folder_;
};

TEST_F(CheckPlugin, WrongUsageExitsWithTwo) {
  ExpectFailure(Palu({"check-plugin"}), 2, "give a command after --");
  ExpectFailure(Palu({"check-plugin", "--"}), 2, "give a command after --");
  ExpectFailure(Palu({"check-plugin", "llama-server", "-m", "x"}), 2, "llama-server");
  ExpectFailure(Palu({"check-plugin", "--timeout", "0", "--", "true"}), 2, "0");
  ExpectFailure(Palu({"check-plugin", "--timeout", "soon", "--", "true"}), 2, "soon");
  ExpectFailure(Palu({"check-plugin", "--where", "--", "true"}), 2, "--where takes no command");
}

TEST_F(CheckPlugin, WherePrintsThePlugInThatWasBuiltWithIt) {
  const Outcome outcome = Palu({"check-plugin", "--where"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  std::istringstream lines(outcome.out);
  std::string path, first, second;
  std::getline(lines, path);
  std::getline(lines, first);
  std::getline(lines, second);
  EXPECT_TRUE(std::filesystem::equivalent(path, PALU_PLUGIN)) << path;
  EXPECT_EQ(first, "export GGML_BACKEND_PATH=" + path);
  EXPECT_EQ(second, "export LLAMA_ARG_DEVICE=PALU");
}

TEST_F(CheckPlugin, YesNamesLayersBitsAndKernel) {
  const std::string server = Script("llama-server", TellUsed() + "echo chatter; sleep 100");
  ExpectYes(Check({server}),
            "30 layers, 4.41 bits per element when full, kernel AVX2 (palu 0.1.0, "
            "PALU_CACHE=palu:rank=32,hi_bit=4)");
}

TEST_F(CheckPlugin, TheCommandGetsItsArgumentsAndTheEnvironmentAsTheyAre) {
  const std::string program =
      Script("program", "for word; do echo \"<$word>\"; done >" + folder_.Path("words") +
                            "\nenv >" + folder_.Path("env") + "\ncat >" + folder_.Path("input"));
  Check({program, "run", "--help", "", "[1,2]", "--", "a b"}, {{"PALU_CACHE", "palu:rank=9"}});
  EXPECT_EQ(folder_.Get("words"), "<run>\n<--help>\n<>\n<[1,2]>\n<-->\n<a b>\n");
  EXPECT_EQ(folder_.Get("input"), "");
  const std::string environment = "\n" + folder_.Get("env");
  for (const std::string& line :
       {std::string("GGML_BACKEND_PATH=") + PALU_PLUGIN, std::string("LLAMA_ARG_DEVICE=PALU"),
        std::string("PALU_CACHE=palu:rank=9")}) {
    EXPECT_NE(environment.find("\n" + line + "\n"), std::string::npos) << line << environment;
  }
}

TEST_F(CheckPlugin, AProgramThatIsNotThereIsNamed) {
  ExpectNo(Check({"no-such-program"}), "cannot start no-such-program: No such file");
  folder_.Put("llama-server", "text");
  ExpectNo(Check({folder_.Path("llama-server")}), "Permission denied");
}

TEST_F(CheckPlugin, AWrongPathIsSaidBeforeALlamaProgramIsStarted) {
  const std::string server = Script("llama-server", "touch " + folder_.Path("started"));
  folder_.Put("text.so", "not a library");
  const auto with = [&](const std::string& path) {
    return Check({server}, {{"GGML_BACKEND_PATH", path}});
  };
  const std::string advice = std::string("export GGML_BACKEND_PATH=");
  ExpectNo(with(""), "GGML_BACKEND_PATH is not set: " + advice);
  ExpectNo(with(folder_.Path("missing.so")), "missing.so: there is no such file: " + advice);
  ExpectNo(with(folder_.Path("text.so")), "text.so cannot be loaded (");
  ExpectNo(with("libm.so.6"), "libm.so.6 is no plug-in of ggml, not palu: " + advice);
  ExpectNo(with(PALU_OTHER_PLUGIN), "is a plug-in of another, not palu: " + advice);
  EXPECT_FALSE(std::filesystem::exists(folder_.Path("started")));
}

TEST_F(CheckPlugin, OtherProgramsMayFindThePlugInThemselves) {
  const std::string program = Script("serve", TellUsed() + "sleep 100");
  ExpectYes(Check({program}, {{"GGML_BACKEND_PATH", ""}}), "30 layers");
  ExpectNo(Check({Script("other", "")}, {{"GGML_BACKEND_PATH", ""}}),
           "GGML_BACKEND_PATH is not set");
  ExpectNo(Check({Script("another", "")}), "another never loaded the plug-in: it is no llama.cpp");
}

TEST_F(CheckPlugin, AFailureOfTheProgramIsShownByItsLastLines) {
  const std::string early = Script("llama-cli", "seq 1 40; echo no model >&2; exit 3");
  const Outcome outcome = Check({early});
  ExpectNo(outcome, "llama-cli failed by itself (exit code 3) before it loaded the plug-in");
  EXPECT_EQ(outcome.err.rfind("the last lines of llama-cli:\n  27\n", 0), 0u) << outcome.err;
  EXPECT_NE(outcome.err.find("  40\n  no model\n"), std::string::npos) << outcome.err;
  const std::string other = Script("chat.py", "exit 1");
  ExpectNo(Check({other}, {{"GGML_BACKEND_PATH", ""}}), "chat.py failed by itself");
  const std::string late = Script("llama-cli", Tell(kLoaded) + "kill -9 $$");
  ExpectNo(Check({late}), "llama-cli failed by itself (exit code 137) before attention ran");
}

TEST_F(CheckPlugin, ARefusalIsPassedOn) {
  const std::string server = Script(
      "llama-server", Tell(std::string(kLoaded) + "refused needs flash attention\n") + "exit 1");
  ExpectNo(Check({server}), "palu refused: needs flash attention\n");
}

TEST_F(CheckPlugin, AServerThatIsReadyWithoutACacheIsNotWaitedFor) {
  const std::string ready = "echo model loaded; echo listening on http://127.0.0.1:1; sleep 100";
  const std::string server = Script("llama-server", Tell(kLoaded) + ready);
  const auto with = [&](const Words& more, const std::string& device) {
    Words words = {server};
    words.insert(words.end(), more.begin(), more.end());
    return Check(words, {{"LLAMA_ARG_DEVICE", device}});
  };
  const std::string start = "when it was ready for requests no cache was in it, as ";
  ExpectNo(with({}, ""), start + "no device was chosen: export LLAMA_ARG_DEVICE=PALU");
  ExpectNo(with({}, "CUDA0"), start + "the device is CUDA0: export LLAMA_ARG_DEVICE=PALU");
  ExpectNo(with({"-nkvo"}, "PALU"), start + "-nkvo keeps it from devices");
  ExpectNo(with({"-ngl", "0"}, "PALU"), start + "-ngl 0 keeps all layers from it");
  const std::string silent = Script("llama-server", ready);
  ExpectNo(
      Check({silent}, {{"LLAMA_ARG_DEVICE", ""}}),
      "llama-server never loaded the plug-in, as it looks for it only when a device is chosen");
}

TEST_F(CheckPlugin, WaitsNoLongerThanItWasTold) {
  const std::string server = Script("llama-server", Tell(kLoaded) + "sleep 100");
  ExpectNo(Check({server}, {}, {"--timeout", "1"}),
           "after 1 s no cache was in it: the model may still be loading, give more time");
}

// Whether a process is there and no zombie.
bool Runs(const std::string& id) {
  std::ifstream status("/proc/" + id + "/stat");
  std::string number, name, state;
  status >> number >> name >> state;
  return !state.empty() && state != "Z" && state != "X";
}

TEST_F(CheckPlugin, NothingThatItStartedIsLeftBehind) {
  if (!std::filesystem::exists("/proc/self/stat")) GTEST_SKIP() << "no /proc here";
  // A script whose child ignores the polite request.
  const std::string program =
      Script("serve", "(trap '' TERM; sleep 100; sleep 100) & echo $! >" + folder_.Path("child") +
                          "\necho $$ >" + folder_.Path("parent") + "\n" + TellUsed() + "wait");
  ExpectYes(Check({program}), "30 layers");
  for (const char* name : {"child", "parent"}) {
    std::istringstream id(folder_.Get(name));
    std::string number;
    id >> number;
    ASSERT_FALSE(number.empty());
    EXPECT_FALSE(Runs(number)) << name;
  }
}

TEST_F(CheckPlugin, StopsTheCommandWhenItIsStopped) {
  for (const int signal : {SIGINT, SIGTERM}) {
    folder_.Put("id", "");
    Invocation call;
    call.arguments = {"check-plugin", "--",
                      Script("serve", "echo $$ >" + folder_.Path("id") + "; sleep 100")};
    bool told = false;
    call.watch = [&](pid_t palu, const std::string&) {
      if (told || folder_.Get("id").empty()) return;
      told = true;
      kill(palu, signal);
    };
    const Outcome outcome = Palu(call);
    EXPECT_EQ(outcome.code, 128 + signal) << outcome.out << outcome.err;
    EXPECT_EQ(outcome.out, "");
    std::istringstream id(folder_.Get("id"));
    std::string number;
    id >> number;
    EXPECT_FALSE(Runs(number));
  }
}

// ---- llama.cpp's own programs, with the plug-in

class CheckStock : public CheckPlugin {
 protected:
  void SetUp() override {
    CheckPlugin::SetUp();
#ifdef PALU_TEST_SANITIZED
    GTEST_SKIP() << "a plug-in with sanitizers does not load into a program without";
#endif
    if (access(Tool("llama-server").c_str(), X_OK) != 0) {
      GTEST_SKIP() << "this llama.cpp has no programs: there is no " << Tool("llama-server");
    }
    WriteTextModel(Model(), true);
  }
  static std::string Tool(const std::string& name) {
    return std::string(PALU_LLAMA_PROGRAMS) + "/" + name;
  }
  std::string Model() const { return folder_.Path("model.gguf"); }  // three layers
  // A server on a port that the system chooses.
  Outcome Server(const Words& more = {},
                 std::vector<std::pair<std::string, std::string>> environment = {}) {
    Words words = {Tool("llama-server"), "-m", Model(), "-c", "256", "-t", "1", "--port", "0"};
    words.insert(words.end(), more.begin(), more.end());
    return Check(words, std::move(environment));
  }
};

TEST_F(CheckStock, AServerThatUsesPaluIsAYes) {
  ExpectYes(Server({}, {{"PALU_CACHE", "palu:fit_tokens=64"}}), "3 layers, ");
  ExpectYes(Server({"-np", "2", "--kv-unified"}, {{"PALU_CACHE", "fp16"}}), "3 layers, 16.");
}

TEST_F(CheckStock, AServerThatDoesNotIsANo) {
  ExpectNo(Server({"-nkvo"}), "as -nkvo keeps it from devices");
  ExpectNo(Server({"-ngl", "0"}), "as -ngl 0 keeps all layers from it");
  ExpectNo(Server({"-ngl", "2"}), "only 1 of 3 layers have their cache in palu");
  unsetenv("LLAMA_ARG_DEVICE");
  Invocation call;
  call.arguments = {"check-plugin", "--", Tool("llama-server"), "-m", Model(), "--port", "0"};
  call.environment = {{"GGML_BACKEND_PATH", PALU_PLUGIN}};
  ExpectNo(Palu(call), "export LLAMA_ARG_DEVICE=PALU");
}

TEST_F(CheckStock, WhatPaluRefusesIsSaidInItsWords) {
  ExpectNo(Server({"-fa", "off"}), "palu refused: needs flash attention: start with -fa on");
  ExpectNo(Server({"-ctk", "q8_0"}), "must be f16 or bf16");
  ExpectNo(Server({}, {{"PALU_CACHE", "palo"}}), "palu refused: PALU_CACHE: ");
}

TEST_F(CheckStock, AMissingModelIsAFailureOfTheProgram) {
  // llama-completion writes its log from a thread of its own and may lose the last lines.
  const Outcome outcome =
      Check({Tool("llama-bench"), "-m", folder_.Path("missing.gguf"), "-dev", "PALU"});
  ExpectNo(outcome, "llama-bench failed by itself (exit code 1)");
  EXPECT_NE(outcome.err.find("missing.gguf"), std::string::npos) << outcome.err;
}

TEST_F(CheckStock, BenchNeedsTheDeviceAsAnArgument) {
  const Words bench = {
      Tool("llama-bench"), "-m", Model(), "-t", "1", "-p", "8", "-n", "0", "-r", "1"};
  ExpectNo(Check(bench), "add -dev PALU (llama-bench does not read LLAMA_ARG_DEVICE)");
  Words with = bench;
  with.insert(with.end(), {"-dev", "PALU"});
  ExpectYes(Check(with), "3 layers, ");
}

TEST_F(CheckStock, AModelWithSlidingWindowsHasTwoCaches) {
  const llama::RandomModel gemma = llama::MakeRandomModel("gemma3");
  llama::WriteRandomModel(gemma, folder_.Path("gemma.gguf"));
  ExpectYes(Check({Tool("llama-bench"), "-m", folder_.Path("gemma.gguf"), "-dev", "PALU", "-t", "1",
                   "-p", "8", "-n", "0", "-r", "1"}),
            std::to_string(gemma.layers) + " layers in 2 caches, ");
}

TEST_F(CheckStock, ARealModelCompletesAText) {
  const char* const model = std::getenv("PALU_TEST_MODEL");
  if (model == nullptr) GTEST_SKIP() << "PALU_TEST_MODEL is not set";
  ExpectYes(Check({Tool("llama-completion"), "-m", model, "-c", "512", "-t", "1", "-n", "2", "-p",
                   "Once upon a time"}),
            "");
}

}  // namespace
}  // namespace palu::app
