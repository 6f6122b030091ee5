#include "eval/eval_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "eval/greedy.h"
#include "eval/needle.h"
#include "palu/palu.h"
#include "parallel.h"
#include "svg.h"

namespace palu::app {
namespace {

using TextTable = std::vector<std::vector<std::string>>;

// The first column to the left, the others to the right.
std::string ToText(const TextTable& table) {
  std::vector<size_t> widths;
  for (const auto& row : table) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : table) {
    for (size_t i = 0; i < row.size(); ++i) {
      text += i == 0 ? fmt::format("{:<{}}", row[i], widths[i])
                     : fmt::format("  {:>{}}", row[i], widths[i]);
    }
    text += "\n";
  }
  return text;
}

std::string Section(const std::string& title, const std::string& note, const TextTable& table) {
  return fmt::format("<h2>{}</h2>\n{}<p class=\"small\">{}</p>\n", Escape(title), HtmlTable(table),
                     Escape(note));
}

}  // namespace

std::string ReportText(const EvalOptions& o, const std::vector<EvalRow>& rows,
                       const EvalResults& results, const CellStore& store) {
  std::string text;
  const auto add = [&](const std::string& table) { text += (text.empty() ? "" : "\n") + table; };
  if (!results.rows.empty()) add(ToTable(results));
  if (o.needle) add(ToText(NeedleTable(o, rows, store)));
  if (o.greedy > 0) add(ToText(GreedyTable(o, rows, store)));
  return text;
}

nlohmann::ordered_json ReportJson(const EvalOptions& o, const std::vector<EvalRow>& rows,
                                  const EvalResults& results, const CellStore& store) {
  const EvalKey& key = store.key();
  nlohmann::ordered_json json = {{"model", key.model},
                                 {"model_sha256", key.model_sha256},
                                 {"text_sha256", key.text_sha256},
                                 {"ctx", key.ctx},
                                 {"chunks", results.chunks},
                                 {"batch", key.batch},
                                 {"mode", key.mode},
                                 {"kernel", KernelTarget()},
                                 {"threads", ThreadCount(o.threads)},
                                 {"version", key.version}};
  if (key.weights != EvalOptions().weights) json["weights"] = key.weights;
  json["results"] = ToJson(results);
  if (o.needle) json["needle"] = NeedleJson(o, rows, store);
  if (o.greedy > 0) json["greedy"] = GreedyJson(o, rows, store);
  return json;
}

EvalPage ReportPage(const EvalOptions& o, const std::vector<EvalRow>& rows,
                    const EvalResults& results, const CellStore& store) {
  const EvalKey& key = store.key();
  EvalPage page;
  page.model = key.model;
  page.command = CommandLine(o);
  page.results = results;
  page.facts = {
      {"model", fmt::format("{}, sha256 {}", key.model, key.model_sha256)},
      {"text", fmt::format("{}, sha256 {}", std::filesystem::path(o.file).filename().string(),
                           key.text_sha256)},
      {"protocol", fmt::format("{} x {} tokens, the second half scored in batches of {}",
                               results.chunks, key.ctx, key.batch)},
      {"weights", key.weights == "f32" ? "expanded to f32" : "as in the file"},
      {"machine", fmt::format("kernels {}, threads {}", KernelTarget(), ThreadCount(o.threads))},
      {"program", "palu " + key.version},
  };
  if (o.needle) {
    page.sections.push_back(
        Section("Pass keys found",
                "A pass key is hidden in filler text at 0, 25, 50, 75 and 100 % of its length; "
                "columns are lengths in tokens. Right: the first number of a greedy answer of 16 "
                "tokens is the key.",
                NeedleTable(o, rows, store)));
  }
  if (o.greedy > 0) {
    page.sections.push_back(
        Section("Greedy agreement with the fp16 cache",
                fmt::format("{} tokens written greedily after prompts of {} tokens; the length is "
                            "that of the common start. A row fp16 is the noise floor.",
                            kGreedyTokens, o.context / 2),
                GreedyTable(o, rows, store)));
  }
  return page;
}

}  // namespace palu::app
