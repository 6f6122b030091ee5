// File: eval_report.h - what an evaluation writes: tables on standard output, JSON, a page.
#ifndef PALU_APPS_EVAL_REPORT_H_
#define PALU_APPS_EVAL_REPORT_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "eval/cells.h"
#include "eval/html.h"
#include "eval/options.h"
#include "eval/results.h"

namespace palu::app {

// All tables, an empty line between them; "" when nothing is measured.
std::string ReportText(const EvalOptions& options, const std::vector<EvalRow>& rows,
                       const EvalResults& results, const CellStore& store);

nlohmann::ordered_json ReportJson(const EvalOptions& options, const std::vector<EvalRow>& rows,
                                  const EvalResults& results, const CellStore& store);

// Without spectra.
EvalPage ReportPage(const EvalOptions& options, const std::vector<EvalRow>& rows,
                    const EvalResults& results, const CellStore& store);

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_REPORT_H_
