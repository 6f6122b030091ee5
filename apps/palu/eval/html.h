// File: html.h - the report of an evaluation as one HTML file that needs nothing else: no
// script, no network, no second file. Follows the reader's light or dark setting.
#ifndef PALU_APPS_EVAL_HTML_H_
#define PALU_APPS_EVAL_HTML_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "eval/results.h"
#include "spectra.h"

namespace palu::app {

struct EvalPage {
  std::string model;                                       // file name
  std::string command;                                     // that makes it
  std::vector<std::pair<std::string, std::string>> facts;  // name, value
  EvalResults results;
  std::vector<std::string> sections;     // more of the page, as HTML
  std::optional<SpectraReport> spectra;  // of the model's K and V
};

std::string ToHtml(const EvalPage& page);

// Rows of cells as an HTML table; the first row is its head. Cells are text, not HTML.
std::string HtmlTable(const std::vector<std::vector<std::string>>& rows);

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_HTML_H_
