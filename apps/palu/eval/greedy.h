// File: greedy.h - greedy agreement: for how long does a model with this cache write the same
// as with an fp16 cache?
#ifndef PALU_APPS_EVAL_GREEDY_H_
#define PALU_APPS_EVAL_GREEDY_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eval/cells.h"
#include "eval/options.h"
#include "llama/model.h"

namespace palu::app {

inline constexpr int64_t kGreedyTokens = 128;  // generated after every prompt

// How two continuations of a prompt compare.
struct Agreement {
  int64_t length = 0;  // of the longest common start
  int64_t same = 0;    // tokens that are equal at their position, also after the first difference
};
// a, b: of one length.
Agreement Compare(std::span<const llama::Token> a, std::span<const llama::Token> b);

// Throws what MeasureGreedy would, before hours of other work.
void CheckGreedy(const llama::Model& model, const EvalOptions& options, std::string_view text);

// Continues options.greedy prompts, each half a context long and evenly spread over the text, with
// the fp16 cache and with each that store.notes has no result of; saves after each prompt. Tokens
// that would end the answer are never picked. The row of the reference itself gets the last tokens
// of its prompts in batches of another size: a noise floor. False after Ctrl-C. Errors: those of
// Session; InputError (the text is shorter than a prompt).
bool MeasureGreedy(const std::shared_ptr<const llama::Model>& model, const EvalOptions& options,
                   const std::vector<EvalRow>& rows, std::string_view text, CellStore& store);

// A row per cache; the first row is the head.
std::vector<std::vector<std::string>> GreedyTable(const EvalOptions& options,
                                                  const std::vector<EvalRow>& rows,
                                                  const CellStore& store);
nlohmann::ordered_json GreedyJson(const EvalOptions& options, const std::vector<EvalRow>& rows,
                                  const CellStore& store);

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_GREEDY_H_
