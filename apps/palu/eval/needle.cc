#include "eval/needle.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "eval/protocol.h"
#include "generate.h"
#include "interrupt.h"
#include "palu/errors.h"
#include "progress.h"
#include "run_options.h"
#include "sampler.h"

namespace palu::app {
namespace {

constexpr int64_t kAnswerTokens = 16;

constexpr char kBefore[] = "A pass key is hidden in the text below. Find it and remember it.\n\n";
constexpr char kQuestion[] = "\n\nWhat is the pass key? Answer with the number.";
constexpr char kAnswerStart[] = "\n\nThe pass key is";  // of models without a chat template

std::string Key(int64_t context, int depth) {
  return std::to_string(10000 + (context * 7919 + depth * 104729 + 48213) % 90000);
}

// The text up to its last space or line break, so that no word or character is cut.
std::string_view WholeWords(std::string_view text) {
  const size_t end = text.find_last_of(" \n");
  return end == std::string_view::npos ? text.substr(0, 0) : text.substr(0, end);
}

std::string Prompt(const llama::Model& model, std::string_view filler, int depth,
                   const std::string& key) {
  const std::string_view before =
      depth == 100 ? filler : WholeWords(filler.substr(0, filler.size() * depth / 100));
  const std::string needle = fmt::format("\n\nThe pass key is {}. Remember it.\n\n", key);
  const std::string body =
      fmt::format("{}{}{}{}{}", kBefore, before, needle, filler.substr(before.size()), kQuestion);
  if (!model.info().has_chat_template) return body + kAnswerStart;
  return model.ApplyChatTemplate(std::vector<llama::ChatMessage>{{"user", body}}, true);
}

// Bytes of the first n tokens of a text.
size_t BytesOf(const llama::Model& model, const std::vector<llama::Token>& tokens, int64_t n) {
  size_t bytes = 0;
  for (int64_t i = 0; i < n; ++i) bytes += model.Piece(tokens[i]).size();
  return bytes;
}

std::string NoteName(const EvalRow& row, int64_t context, int depth) {
  return fmt::format("needle, {} tokens, depth {} %, {}", context, depth, row.resolved);
}

struct Question {
  const EvalRow* row;
  int64_t context;
  int depth;
};

// What store.notes has no answer of, in the order of rows, contexts, depths.
std::vector<Question> Open(const EvalOptions& o, const std::vector<EvalRow>& rows,
                           const CellStore& store) {
  std::vector<Question> open;
  for (const EvalRow& row : rows) {
    for (const int64_t context : o.needle_contexts) {
      for (const int depth : kNeedleDepths) {
        if (!store.notes.contains(NoteName(row, context, depth))) {
          open.push_back({&row, context, depth});
        }
      }
    }
  }
  return open;
}

// How many were asked, and how many found the key.
struct Count {
  int64_t asked = 0, right = 0;
  void Add(const nlohmann::ordered_json& note) {
    ++asked;
    right += note.at("right").get<bool>();
  }
  std::string text() const { return asked > 0 ? fmt::format("{}/{}", right, asked) : "-"; }
};

const nlohmann::ordered_json* Find(const CellStore& store, const EvalRow& row, int64_t context,
                                   int depth) {
  const auto found = store.notes.find(NoteName(row, context, depth));
  return found == store.notes.end() ? nullptr : &found->second;
}

}  // namespace

NeedlePrompt MakeNeedlePrompt(const llama::Model& model, std::string_view text, int64_t context,
                              int depth) {
  const std::string key = Key(context, depth);
  const auto tokenize = [&](std::string_view filler) {
    return model.Tokenize(Prompt(model, filler, depth, key), true, true);
  };
  const int64_t limit = context - kAnswerTokens;
  constexpr int64_t kMostBytes = 24;  // of a token, on average and by far
  if (static_cast<int64_t>(text.size()) > context * kMostBytes) {
    text = WholeWords(text.substr(0, context * kMostBytes));
  }
  const std::vector<llama::Token> words = model.Tokenize(text, false, false);
  int64_t n = limit - static_cast<int64_t>(tokenize("").size());
  if (n < 1) {
    throw InputError(fmt::format("--needle-ctx {} leaves no room for a text", context));
  }
  if (n > static_cast<int64_t>(words.size())) {
    throw InputError(
        fmt::format("the text has {} tokens, --needle-ctx {} needs {}", words.size(), context, n));
  }
  while (true) {
    // Cut anew at a space, the text may have a token more than it was cut at.
    std::vector<llama::Token> tokens =
        tokenize(WholeWords(text.substr(0, BytesOf(model, words, n))));
    const int64_t excess = static_cast<int64_t>(tokens.size()) - limit;
    if (excess <= 0 || n == 0) return {std::move(tokens), key};
    n = std::max<int64_t>(0, n - excess);
  }
}

bool NamesKey(std::string_view answer, std::string_view key) {
  const auto digit = [](unsigned char c) { return std::isdigit(c) != 0; };
  const auto first = std::find_if(answer.begin(), answer.end(), digit);
  const auto last = std::find_if_not(first, answer.end(), digit);
  return std::string_view(first, last) == key;
}

void CheckNeedle(const llama::Model& model, const EvalOptions& o, std::string_view text) {
  if (!o.needle) return;
  for (const int64_t context : o.needle_contexts) {
    MakeNeedlePrompt(model, text, context, kNeedleDepths[0]);
    WarnBeyondTraining(model, context);
  }
}

bool MeasureNeedle(const std::shared_ptr<const llama::Model>& model, const EvalOptions& o,
                   const std::vector<EvalRow>& rows, std::string_view text, CellStore& store) {
  const std::vector<Question> open = Open(o, rows, store);
  int64_t all = 0, done = 0;
  for (const Question& q : open) all += q.context;
  Progress progress("needle", all, ProgressUnit::kShare);
  std::unique_ptr<llama::Session> session;
  const EvalRow* row = nullptr;
  int64_t context = 0;
  for (const Question& q : open) {
    if (q.row != row || q.context != context) {
      session = nullptr;
      session = OpenEvalSession(model, o, q.row->cache, q.context);
      row = q.row;
      context = q.context;
    }
    session->Clear();
    const NeedlePrompt prompt = MakeNeedlePrompt(*model, text, q.context, q.depth);
    session->Decode(prompt.tokens, llama::LogitRows::kLast, [&](int64_t n) {
      progress.Update(done + n);
      return !Interrupted();
    });
    if (Interrupted()) return false;
    Sampler sampler({});
    const Answer answer = Generate(*session, sampler, {.tokens = kAnswerTokens}, [](auto) {});
    if (answer.stop == Stop::kInterrupted) return false;
    store.notes[NoteName(*q.row, q.context, q.depth)] = {
        {"key", prompt.key}, {"answer", answer.text}, {"right", NamesKey(answer.text, prompt.key)}};
    store.Save();
    done += q.context;
  }
  return true;
}

std::vector<std::vector<std::string>> NeedleTable(const EvalOptions& o,
                                                  const std::vector<EvalRow>& rows,
                                                  const CellStore& store) {
  std::vector<std::vector<std::string>> table = {{"pass keys found"}};
  for (const int64_t context : o.needle_contexts) table[0].push_back(fmt::format("{}", context));
  table[0].push_back("all");
  for (const EvalRow& row : rows) {
    table.push_back({row.cache});
    Count all;
    for (const int64_t context : o.needle_contexts) {
      Count count;
      for (const int depth : kNeedleDepths) {
        const auto* note = Find(store, row, context, depth);
        if (note == nullptr) continue;
        count.Add(*note);
        all.Add(*note);
      }
      table.back().push_back(count.text());
    }
    table.back().push_back(all.text());
  }
  return table;
}

nlohmann::ordered_json NeedleJson(const EvalOptions& o, const std::vector<EvalRow>& rows,
                                  const CellStore& store) {
  using nlohmann::ordered_json;
  ordered_json results = ordered_json::array();
  for (const EvalRow& row : rows) {
    ordered_json contexts = ordered_json::array();
    Count all;
    for (const int64_t context : o.needle_contexts) {
      ordered_json depths = ordered_json::array();
      Count count;
      for (const int depth : kNeedleDepths) {
        const auto* note = Find(store, row, context, depth);
        if (note == nullptr) continue;
        count.Add(*note);
        all.Add(*note);
        ordered_json entry = {{"depth", depth}};
        entry.update(*note);
        depths.push_back(std::move(entry));
      }
      contexts.push_back({{"ctx", context},
                          {"right", count.right},
                          {"of", count.asked},
                          {"depths", std::move(depths)}});
    }
    results.push_back({{"cache", row.cache},
                       {"right", all.right},
                       {"of", all.asked},
                       {"contexts", std::move(contexts)}});
  }
  return {{"contexts", o.needle_contexts}, {"depths", kNeedleDepths}, {"results", results}};
}

}  // namespace palu::app
