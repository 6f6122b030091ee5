// File: page_spectra.h - the spectra that an evaluation's page shows.
#ifndef PALU_APPS_EVAL_PAGE_SPECTRA_H_
#define PALU_APPS_EVAL_PAGE_SPECTRA_H_

#include <memory>
#include <optional>

#include "eval/options.h"
#include "eval/protocol.h"
#include "spectra.h"

namespace palu::app {

// Of the K and V of a chunk, at most 4,096 tokens of it. Nothing after Ctrl-C.
std::optional<SpectraReport> MeasureSpectra(const std::shared_ptr<const llama::Model>& model,
                                            const EvalOptions& options, const Chunk& chunk);

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_PAGE_SPECTRA_H_
