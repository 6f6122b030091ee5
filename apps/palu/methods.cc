// The verb `methods`: what --cache accepts, and what the kernels run on.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "palu/palu.h"
#include "run_options.h"
#include "verbs.h"

namespace palu::app {
namespace {

std::string Join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text.empty() ? "-" : text;
}

std::string MethodTable() {
  std::vector<std::vector<std::string>> rows = {{"method", "keys", "values", "presets"}};
  for (const MethodInfo& method : ListMethods()) {
    rows.push_back({method.name, method.keys, method.values, Join(method.presets)});
  }
  std::vector<size_t> widths(rows[0].size(), 0);
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) line += fmt::format("{:<{}}  ", row[i], widths[i]);
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

int Methods() {
  std::string text = MethodTable();
  text +=
      "llama:TYPE[/TYPE_V][,fa=off] leaves llama.cpp's own cache in place: f16, f32, q8_0, q4_0, "
      "...\n";
  text += "\nA cache is METHOD[:PRESET][,key=value]..., such as palu:reference,rank=32\n\n";
  text += DescribeOptions();
  if (!text.ends_with('\n')) text += "\n";
  text += fmt::format("\nkernels: {} (this CPU can run: {}; PALU_TARGET=NAME forces one)\n",
                      KernelTarget(), Join(SupportedKernelTargets()));
  WriteOut(text);
  return 0;
}

}  // namespace

void AddMethods(CLI::App& app, Action& action) {
  CLI::App* verb =
      app.add_subcommand("methods", "List cache methods, presets, options and kernels");
  verb->callback([&action] { action = Methods; });
}

}  // namespace palu::app
