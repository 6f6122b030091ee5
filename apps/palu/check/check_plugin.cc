// The verb `check-plugin`: whether a command line of llama.cpp really has palu as its KV cache.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check/llama_options.h"
#include "check/plugin_events.h"
#include "check/plugin_file.h"
#include "check/verdict.h"
#include "check/watched_process.h"
#include "llama/gguf_file.h"
#include "palu/palu.h"
#include "run_options.h"
#include "verbs.h"

namespace palu::app {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr char kFooter[] =
    "The command, with its arguments, goes after --. Examples:\n"
    "  palu check-plugin -- llama-server -m model.gguf -c 32768\n"
    "  palu check-plugin --timeout 600 -- llama-cli -m large.gguf\n"
    "  palu check-plugin --where\n"
    "Set GGML_BACKEND_PATH, LLAMA_ARG_DEVICE and PALU_CACHE as for the real run. The command is "
    "started without input, and stopped as soon as it has run attention on palu's cache.\n"
    "Exit codes: 0 yes, 1 no.";

struct CheckOptions {
  int timeout = 120;  // s
  bool where = false;
};

// For report and output; removed at the end.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::string name = (fs::temp_directory_path() / "palu-check-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw StateError("cannot make a folder " + name);
    path_ = name;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  std::string Path(const char* name) const { return (path_ / name).string(); }

 private:
  fs::path path_;
};

volatile sig_atomic_t asked_to_end = 0;

// The command has to be stopped also when this program is.
void CatchEnd() {
  struct sigaction action = {};
  action.sa_handler = [](int signal) { asked_to_end = signal; };
  sigemptyset(&action.sa_mask);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaction(signal, &action, nullptr);
}

// The last bytes of a file, as many as there are.
std::string End(const std::string& path, int64_t bytes) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return "";
  const auto size = static_cast<int64_t>(file.tellg());
  file.seekg(std::max<int64_t>(0, size - bytes));
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

PluginEvents ReadEvents(const std::string& path) { return ParsePluginEvents(End(path, 1 << 20)); }

// Looks until attention has run, the command has ended, or there is nothing more to wait for.
class Watch {
 public:
  Watch(WatchedProcess& process, std::string report, std::string output, int timeout)
      : process_(process),
        report_(std::move(report)),
        output_(std::move(output)),
        limit_(Clock::now() + std::chrono::seconds(timeout)) {}

  void Run(Observation& seen) {
    while (asked_to_end == 0) {
      const std::optional<int> code = process_.Ended();  // before reading what it wrote last
      seen.events = ReadEvents(report_);
      if (seen.events.used && AllCachesShown(seen.events)) return Finish(seen, Ending::kUsed);
      if (code) {
        seen.exit_code = *code;
        return Finish(seen, Ending::kExited);
      }
      if (IsReady()) return Finish(seen, Ending::kReady);
      if (Clock::now() > limit_) return Finish(seen, Ending::kTime);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }

 private:
  static void Finish(Observation& seen, Ending ending) { seen.ending = ending; }

  // A model with sliding windows has two caches, and its first layer uses one of them.
  bool AllCachesShown(const PluginEvents& events) {
    if (events.bits.size() >= events.reserved.size()) return true;
    if (!used_since_) used_since_ = Clock::now();
    return Clock::now() > *used_since_ + std::chrono::seconds(10);
  }

  // llama-server says so in its log, after its warm-up.
  bool IsReady() {
    if (ready_since_) return Clock::now() > *ready_since_ + std::chrono::seconds(1);
    const std::string text = End(output_, 1 << 14);
    if (text.find("listening on http") != std::string::npos &&
        text.find("model loaded") != std::string::npos) {
      ready_since_ = Clock::now();
    }
    return false;
  }

  WatchedProcess& process_;
  std::string report_, output_;
  Clock::time_point limit_;
  std::optional<Clock::time_point> used_since_, ready_since_;
};

// Layers of the model that the command names, if it does and the file says so.
int64_t ModelLayers(const LlamaOptions& options) {
  if (options.model.empty()) return 0;
  try {
    return llama::CheckGgufFile(options.model).cached_layers;
  } catch (const Error&) {
    return 0;  // the program will say what is wrong with it
  }
}

void ShowEnd(const std::string& program, const std::string& output) {
  constexpr int kLines = 15;
  std::istringstream text(End(output, 1 << 14));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) {
    if (!line.empty()) lines.push_back(line);
  }
  if (lines.empty()) return;
  fmt::print(stderr, "the last lines of {}:\n", program);
  for (size_t i = lines.size() > kLines ? lines.size() - kLines : 0; i < lines.size(); ++i) {
    fmt::print(stderr, "  {}\n", lines[i]);
  }
}

int Say(const Verdict& verdict) {
  WriteOut(fmt::format("{}: {}\n", verdict.yes ? "yes" : "no", verdict.text));
  return verdict.yes ? 0 : 1;
}

int Check(const CheckOptions& o, const std::vector<std::string>& command) {
  Observation seen;
  seen.program = fs::path(command[0]).filename().string();
  seen.options = ReadLlamaOptions(command);
  seen.file_fault = PluginFileFault(std::getenv("GGML_BACKEND_PATH"));
  seen.seconds = o.timeout;
  // What a script or a Python program sets for itself is not known.
  if (seen.options.is_llama && !seen.file_fault.empty()) return Say({false, seen.file_fault});
  seen.model_layers = ModelLayers(seen.options);

  const ScratchFolder folder;
  const std::string report = folder.Path("report"), output = folder.Path("output");
  CatchEnd();
  try {
    WatchedProcess process({command, {{"PALU_REPORT", report}}, output});
    Watch(process, report, output, o.timeout).Run(seen);
    process.Stop();
  } catch (const StateError& error) {
    return Say({false, error.what()});
  }
  if (asked_to_end != 0) return 128 + asked_to_end;
  const Verdict verdict = Judge(seen);
  if (!verdict.yes) ShowEnd(seen.program, output);
  return Say(verdict);
}

int Where() {
  const std::string plugin = OwnPlugin();
  WriteOut(
      fmt::format("{0}\n"
                  "export GGML_BACKEND_PATH={0}\n"
                  "export LLAMA_ARG_DEVICE=PALU\n",
                  plugin));
  return 0;
}

int CheckPlugin(const CheckOptions& o, const std::vector<std::string>& command) {
  if (o.where && !command.empty()) throw UsageError("--where takes no command");
  if (o.where) return Where();
  if (command.empty() || command[0].empty()) {
    throw UsageError(
        "nothing to check: give a command after --, as in palu check-plugin -- llama-server -m "
        "model.gguf");
  }
  return Check(o, command);
}

}  // namespace

void AddCheckPlugin(CLI::App& app, Action& action, std::vector<std::string> command) {
  auto options = std::make_shared<CheckOptions>();
  CLI::App* verb = app.add_subcommand(
      "check-plugin", "Tell whether a llama.cpp program really uses palu, and why not");
  verb->footer(kFooter);
  verb->add_option("--timeout", options->timeout, "Seconds to wait for the first attention")
      ->capture_default_str()
      ->check(CLI::Range(1, 86400).description(""))
      ->type_name("S");
  verb->add_flag("--where", options->where,
                 "Print the path of the plug-in of this palu, and what to export");
  verb->callback([options, command = std::move(command), &action] {
    action = [options, command] { return CheckPlugin(*options, command); };
  });
}

}  // namespace palu::app
