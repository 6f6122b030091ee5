// File: needle.h - the retrieval check: can a model with this cache still find a pass key that
// stood somewhere in a long text?
#ifndef PALU_APPS_EVAL_NEEDLE_H_
#define PALU_APPS_EVAL_NEEDLE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "eval/cells.h"
#include "eval/options.h"
#include "llama/model.h"

namespace palu::app {

// Where the needle stands, in percent of the filler before it.
inline constexpr std::array<int, 5> kNeedleDepths = {0, 25, 50, 75, 100};

struct NeedlePrompt {
  std::vector<llama::Token> tokens;
  std::string key;  // 5 digits
};

// A prompt that fills `context` tokens with the answer's: filler from the start of `text`, the
// needle at the depth, the question at the end, in the model's chat template where it has one. The
// key depends on context and depth. Errors: InputError (the text is too short, the context too
// small).
NeedlePrompt MakeNeedlePrompt(const llama::Model& model, std::string_view text, int64_t context,
                              int depth);

// Whether the first number of an answer is the key.
bool NamesKey(std::string_view answer, std::string_view key);

// Throws what MeasureNeedle would, before hours of other work.
void CheckNeedle(const llama::Model& model, const EvalOptions& options, std::string_view text);

// Asks every cache at every context and depth that store.notes has no answer of; saves after each.
// False after Ctrl-C. Errors: those of Session and MakeNeedlePrompt.
bool MeasureNeedle(const std::shared_ptr<const llama::Model>& model, const EvalOptions& options,
                   const std::vector<EvalRow>& rows, std::string_view text, CellStore& store);

// Rows: caches; columns: right answers at each context, such as "5/5", then all. The first row is
// the head. What is not asked yet does not count.
std::vector<std::vector<std::string>> NeedleTable(const EvalOptions& options,
                                                  const std::vector<EvalRow>& rows,
                                                  const CellStore& store);
nlohmann::ordered_json NeedleJson(const EvalOptions& options, const std::vector<EvalRow>& rows,
                                  const CellStore& store);

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_NEEDLE_H_
