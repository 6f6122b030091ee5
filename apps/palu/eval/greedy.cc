#include "eval/greedy.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "eval/protocol.h"
#include "eval/score.h"
#include "generate.h"
#include "interrupt.h"
#include "palu/errors.h"
#include "progress.h"
#include "sampler.h"

namespace palu::app {
namespace {

using Tokens = std::vector<llama::Token>;

// Of the noise floor's prompts, in batches of kFewTokens.
constexpr int64_t kSlowEnd = 64;

std::string NoteName(const EvalOptions& o, const EvalRow& row, int64_t prompt) {
  return fmt::format("greedy, prompt {} of {}, {}", prompt + 1, o.greedy, row.resolved);
}

std::vector<Tokens> Prompts(const llama::Model& model, const EvalOptions& o,
                            std::string_view text) {
  const Tokens all = model.Tokenize(text, false, false);
  Tokens start;
  if (model.info().adds_bos) start = model.Tokenize("", true, false);
  const int64_t body = o.context / 2 - static_cast<int64_t>(start.size());
  const int64_t spare = static_cast<int64_t>(all.size()) - body;
  if (spare < 0) {
    throw InputError(fmt::format("{} has {} tokens; a prompt of half of --ctx {} needs {}", o.file,
                                 all.size(), o.context, body));
  }
  std::vector<Tokens> prompts(o.greedy, start);
  for (int64_t i = 0; i < o.greedy; ++i) {
    const int64_t first = o.greedy > 1 ? spare * i / (o.greedy - 1) : 0;
    prompts[i].insert(prompts[i].end(), all.begin() + first, all.begin() + first + body);
  }
  return prompts;
}

// The tokens that a session writes after a prompt; fewer after Ctrl-C.
Tokens Continue(llama::Session& session, const Tokens& prompt, bool noise_floor,
                const Tokens& banned) {
  session.Clear();
  const auto all = std::span(prompt);
  const auto n = static_cast<int64_t>(prompt.size());
  const int64_t fast = noise_floor ? std::max<int64_t>(0, n - kSlowEnd) : n;
  const auto go_on = [](int64_t) { return !Interrupted(); };
  if (fast > 0) session.Decode(all.first(fast), llama::LogitRows::kLast, go_on);
  for (int64_t at = fast; at < n && !Interrupted(); at += kFewTokens) {
    session.Decode(all.subspan(at, std::min(kFewTokens, n - at)));
  }
  Sampler sampler({});
  sampler.Ban(banned);
  Tokens tokens;
  while (!Interrupted()) {
    tokens.push_back(sampler.Sample(session.Logits()));
    if (static_cast<int64_t>(tokens.size()) == kGreedyTokens) break;
    session.Decode(std::span(&tokens.back(), 1));
  }
  return tokens;
}

// Sums over the prompts of one row.
struct RowSum {
  std::vector<double> length, same;
  int64_t undiverged = 0;
};

RowSum SumOf(const EvalOptions& o, const EvalRow& row, const CellStore& store) {
  RowSum sum;
  for (int64_t i = 0; i < o.greedy; ++i) {
    const auto found = store.notes.find(NoteName(o, row, i));
    if (found == store.notes.end()) continue;
    sum.length.push_back(found->second.at("length"));
    sum.same.push_back(found->second.at("same"));
    sum.undiverged += sum.length.back() == kGreedyTokens;
  }
  return sum;
}

std::string Percent(double share) {
  return std::isnan(share) ? "-" : fmt::format("{:.1f} %", 100 * share);
}

}  // namespace

Agreement Compare(std::span<const llama::Token> a, std::span<const llama::Token> b) {
  Agreement agreement;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) continue;
    ++agreement.same;
    if (agreement.length == static_cast<int64_t>(i)) ++agreement.length;
  }
  return agreement;
}

void CheckGreedy(const llama::Model& model, const EvalOptions& o, std::string_view text) {
  if (o.greedy > 0) Prompts(model, o, text);
}

bool MeasureGreedy(const std::shared_ptr<const llama::Model>& model, const EvalOptions& o,
                   const std::vector<EvalRow>& rows, std::string_view text, CellStore& store) {
  std::vector<std::pair<const EvalRow*, std::unique_ptr<llama::Session>>> open;
  const auto lacks = [&](const EvalRow& row, int64_t i) {
    return !store.notes.contains(NoteName(o, row, i));
  };
  const std::vector<Tokens> prompts = Prompts(*model, o, text);
  int64_t all = 0, done = 0;
  for (const EvalRow& row : rows) {
    int64_t missing = 0;
    for (int64_t i = 0; i < o.greedy; ++i) missing += lacks(row, i);
    if (missing > 0) open.emplace_back(&row, OpenEvalSession(model, o, row.cache, o.context));
    all += missing;
  }
  if (open.empty()) return true;
  const auto reference = OpenEvalSession(model, o, kReferenceCache, o.context);
  const Tokens banned = EndTokens(*model);
  Progress progress("greedy", all, ProgressUnit::kShare);
  for (int64_t i = 0; i < o.greedy; ++i) {
    Tokens expected;
    for (const auto& [row, session] : open) {
      if (!lacks(*row, i)) continue;
      if (expected.empty()) expected = Continue(*reference, prompts[i], false, banned);
      const Tokens tokens = Continue(*session, prompts[i], row->noise_floor, banned);
      if (Interrupted()) return false;
      const Agreement agreement = Compare(expected, tokens);
      store.notes[NoteName(o, *row, i)] = {{"length", agreement.length}, {"same", agreement.same}};
      progress.Update(++done);
    }
    store.Save();
  }
  return true;
}

std::vector<std::vector<std::string>> GreedyTable(const EvalOptions& o,
                                                  const std::vector<EvalRow>& rows,
                                                  const CellStore& store) {
  std::vector<std::vector<std::string>> table = {
      {"greedy agreement", "prompts", "same until the first difference", "mean length", "+-",
       "same at their position", "without a difference"}};
  for (const EvalRow& row : rows) {
    const RowSum sum = SumOf(o, row, store);
    const Estimate length = MeanOverChunks(sum.length), same = MeanOverChunks(sum.same);
    const auto number = [](double x) { return std::isnan(x) ? "-" : fmt::format("{:.1f}", x); };
    table.push_back({row.cache, std::to_string(sum.length.size()),
                     Percent(length.mean / kGreedyTokens), number(length.mean),
                     number(length.standard_error), Percent(same.mean / kGreedyTokens),
                     std::to_string(sum.undiverged)});
  }
  return table;
}

nlohmann::ordered_json GreedyJson(const EvalOptions& o, const std::vector<EvalRow>& rows,
                                  const CellStore& store) {
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  for (const EvalRow& row : rows) {
    const RowSum sum = SumOf(o, row, store);
    const Estimate length = MeanOverChunks(sum.length);
    results.push_back({{"cache", row.cache},
                       {"prompts", sum.length.size()},
                       {"agreement", length.mean / kGreedyTokens},
                       {"agreement_se", length.standard_error / kGreedyTokens},
                       {"mean_length", length.mean},
                       {"same_position", MeanOverChunks(sum.same).mean / kGreedyTokens},
                       {"undiverged", sum.undiverged}});
  }
  return {{"prompts", o.greedy},
          {"prompt_tokens", o.context / 2},
          {"tokens", kGreedyTokens},
          {"results", results}};
}

}  // namespace palu::app
