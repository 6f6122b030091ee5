#include "eval/page_spectra.h"

#include <algorithm>
#include <span>

#include "interrupt.h"
#include "progress.h"
#include "spectra_collector.h"

namespace palu::app {

std::optional<SpectraReport> MeasureSpectra(const std::shared_ptr<const llama::Model>& model,
                                            const EvalOptions& o, const Chunk& chunk) {
  constexpr size_t kMostTokens = 4096;
  constexpr int kGroups = 4;
  if (Interrupted()) return std::nullopt;
  const auto tokens = std::span(chunk).first(std::min(chunk.size(), kMostTokens));
  const auto session = OpenEvalSession(model, o, kReferenceCache, o.context);
  SpectraCollector collector(kGroups);
  session->SetObserver(collector.Observer());
  Progress progress("spectra", static_cast<int64_t>(tokens.size()));
  const bool whole = session->Decode(tokens, llama::LogitRows::kNone, [&](int64_t done) {
    progress.Update(done);
    return !Interrupted();
  });
  if (!whole) return std::nullopt;
  SpectraReport report;
  report.model = o.model;
  report.file = o.file;
  report.tokens = static_cast<int64_t>(tokens.size());
  report.context = o.context;
  report.layers = collector.Spectra(o.context);
  return report;
}

}  // namespace palu::app
