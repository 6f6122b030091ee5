// File: verbs.h - the verbs of the program. Each Add... declares one verb and its options; when
// that verb is on the command line, parsing sets `action` to what it does. An action returns the
// exit code.
#ifndef PALU_APPS_VERBS_H_
#define PALU_APPS_VERBS_H_

#include <CLI/CLI.hpp>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace palu::app {

using Action = std::function<int()>;

void AddRun(CLI::App& app, Action& action);
void AddInspect(CLI::App& app, Action& action);
void AddEval(CLI::App& app, Action& action);
void AddRecommend(CLI::App& app, Action& action);
void AddBench(CLI::App& app, Action& action);
void AddFit(CLI::App& app, Action& action);
void AddMethods(CLI::App& app, Action& action);
// `command`: what stands after "--".
void AddCheckPlugin(CLI::App& app, Action& action, std::vector<std::string> command);

inline constexpr int kRuntimeErrorExit = 1;
inline constexpr int kUsageExit = 2;

// Options that do not go together, or are missing. A ConfigError means the same.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace palu::app

#endif  // PALU_APPS_VERBS_H_
