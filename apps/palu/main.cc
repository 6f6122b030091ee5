// palu: runs GGUF models whose KV cache is kept as packed low-rank latents.
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "palu/palu.h"
#include "verbs.h"

namespace {

constexpr char kExitCodes[] =
    "Exit codes: 0 done, 1 something failed (a file, memory, the model), 2 wrong option, 130 "
    "stopped "
    "by Ctrl-C.";

// Every message is one line on stderr: "palu: error: ...".
void SetUpLog() {
  spdlog::set_default_logger(spdlog::stderr_color_mt("palu"));
  spdlog::set_pattern("palu: %^%l%$: %v");
}

int Fail(int code, std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  spdlog::error("{}", message);
  return code;
}

std::string UsageMessage(const CLI::App& app, const CLI::ParseError& e) {
  const std::vector<std::string> rest = app.remaining();
  // CLI11 would only say that a subcommand is missing.
  if (e.get_name() == "RequiredError" && app.get_subcommands().empty() && !rest.empty()) {
    return "there is no verb " + rest[0] + " (see palu --help)";
  }
  return std::string(e.what()) + " (see palu --help)";
}

// `palu check-plugin ... -- COMMAND...`: takes the command away, which CLI11 would read its own
// syntax into.
std::vector<std::string> TakeCommand(int& argc, char** argv) {
  if (argc < 2 || std::string(argv[1]) != "check-plugin") return {};
  char** const end = argv + argc;
  char** const mark = std::find(argv, end, std::string("--"));
  argc = static_cast<int>(mark - argv);
  return {mark == end ? end : mark + 1, end};
}

int Main(int argc, char** argv) {
  using palu::app::kRuntimeErrorExit, palu::app::kUsageExit;
  CLI::App app{"Runs GGUF models with a KV cache of packed low-rank latents.", "palu"};
  app.footer(kExitCodes);
  app.set_version_flag("--version", std::string("palu ") + PALU_VERSION);
  app.require_subcommand(1);
  palu::app::Action action;
  palu::app::AddRun(app, action);
  palu::app::AddInspect(app, action);
  palu::app::AddEval(app, action);
  palu::app::AddFit(app, action);
  palu::app::AddRecommend(app, action);
  palu::app::AddBench(app, action);
  palu::app::AddMethods(app, action);
  palu::app::AddCheckPlugin(app, action, TakeCommand(argc, argv));
  try {
    app.parse(argc, argv);
    palu::KernelTarget();  // a wrong PALU_TARGET is better said before the work
    return action();
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help and --version
    return Fail(kUsageExit, UsageMessage(app, e));
  } catch (const palu::app::UsageError& e) {
    return Fail(kUsageExit, e.what());
  } catch (const palu::ConfigError& e) {
    return Fail(kUsageExit, e.what());
  } catch (const std::bad_alloc&) {
    return Fail(kRuntimeErrorExit, "out of memory");
  } catch (const std::exception& e) {
    return Fail(kRuntimeErrorExit, e.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  SetUpLog();
  return Main(argc, argv);
}
