// File: protocol.h - how caches are measured against the reference on the chunks of a text.
//
// All caches walk through a chunk side by side, one batch at a time, so the logits of one batch are
// all that is ever held. The first half of a chunk fills the cache, in batches of 512; the second
// half is scored: at every position the distribution of each cache is compared with that of an fp16
// cache that sees the same tokens.
#ifndef PALU_APPS_EVAL_PROTOCOL_H_
#define PALU_APPS_EVAL_PROTOCOL_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "eval/cells.h"
#include "eval/options.h"
#include "llama/session.h"

namespace palu::app {

// Our attention adds in the same order however tokens are cut into batches, but for batches of very
// few tokens. So noise floors run in batches of so many where the reference has large ones.
inline constexpr int64_t kFewTokens = 2;

// A session as all checks of an evaluation use it.
std::unique_ptr<llama::Session> OpenEvalSession(const std::shared_ptr<const llama::Model>& model,
                                                const EvalOptions& options,
                                                const std::string& cache, int64_t context);

using Chunk = std::vector<llama::Token>;

// The first options.chunks chunks of the text, as many as there are: options.context tokens each,
// the first of them BOS where the model wants it. Errors: InputError (shorter than one chunk).
std::vector<Chunk> CutChunks(const llama::Model& model, const EvalOptions& options,
                             std::string_view text);

// Measures the cells of `rows` that `cells` lacks, chunk by chunk, and calls `finished` after each.
// Returns false when Ctrl-C stopped it: then `cells` holds the chunks finished before.
// Errors: those of Session; InputError for logits that are no numbers, which names cache and token.
bool MeasureCells(const std::shared_ptr<const llama::Model>& model, const EvalOptions& options,
                  const std::vector<EvalRow>& rows, const std::vector<Chunk>& chunks,
                  CellMap& cells, const std::function<void()>& finished);

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_PROTOCOL_H_
