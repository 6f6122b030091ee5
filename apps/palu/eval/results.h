// File: results.h - cells summed up: one row of figures per cache, as a table and as JSON.
#ifndef PALU_APPS_EVAL_RESULTS_H_
#define PALU_APPS_EVAL_RESULTS_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "eval/cells.h"
#include "eval/options.h"
#include "eval/score.h"

namespace palu::app {

struct RowResult {
  EvalRow row;
  // Means over chunks. What a single chunk cannot tell, a standard error, is NaN and JSON's null.
  double code_bits = 0, stored_bits = 0, stored_bits_at_32k = 0, exact_tokens = 0, kv_mib = 0;
  Estimate kl;
  double kl_median = 0, kl_p999 = 0;
  double top1 = 0;  // share of positions with the reference's likeliest token
  double ppl = 0, ppl_se = 0;
  double ppl_diff = 0;  // less the reference's
  double prompt_tok_s = 0, decode_tok_s = 0;
};

struct EvalResults {
  std::vector<RowResult> rows;
  std::vector<EvalRow> unmeasured;  // rows without a cell
  int64_t chunks = 0;               // behind every row: those that all rows have
};

// Over the first `chunks` chunks.
EvalResults SumUp(const std::vector<EvalRow>& rows, const CellMap& cells, int64_t chunks);

// For people: a header and a line per row.
std::string ToTable(const EvalResults& results);
// The array "results".
nlohmann::ordered_json ToJson(const EvalResults& results);

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_RESULTS_H_
