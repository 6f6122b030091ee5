#include "eval/results.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "measure.h"

namespace palu::app {
namespace {

// Sums over the cells of one row.
class RowSum {
 public:
  void Add(const Cell& cell, const Cell& reference) {
    chunk_kl_.push_back(Mean(cell.kl));
    chunk_nll_.push_back(Mean(cell.nll));
    reference_nll_.push_back(Mean(reference.nll));
    kl_.insert(kl_.end(), cell.kl.begin(), cell.kl.end());
    same_top_ += std::accumulate(cell.same_top.begin(), cell.same_top.end(), int64_t{0});
    size_.code_bits += cell.size.code_bits;
    size_.stored_bits += cell.size.stored_bits;
    size_.stored_bits_at_32k += cell.size.stored_bits_at_32k;
    size_.exact_tokens += cell.size.exact_tokens;
    size_.kv_bytes += cell.size.kv_bytes;
    prompt_tokens_ += cell.prompt_tokens;
    scored_tokens_ += cell.scored_tokens;
    prompt_seconds_ += cell.prompt_seconds;
    scored_seconds_ += cell.scored_seconds;
  }

  RowResult Result(const EvalRow& row) {
    const auto n = static_cast<double>(chunk_kl_.size());
    const Estimate nll = MeanOverChunks(chunk_nll_);
    RowResult r;
    r.row = row;
    r.code_bits = size_.code_bits / n;
    r.stored_bits = size_.stored_bits / n;
    r.stored_bits_at_32k = size_.stored_bits_at_32k / n;
    r.exact_tokens = static_cast<double>(size_.exact_tokens) / n;
    r.kv_mib = static_cast<double>(size_.kv_bytes) / n / (1 << 20);
    r.kl = MeanOverChunks(chunk_kl_);
    r.kl_median = Quantile(kl_, 0.5);
    r.kl_p999 = Quantile(kl_, 0.999);
    r.top1 = static_cast<double>(same_top_) / static_cast<double>(kl_.size());
    r.ppl = std::exp(nll.mean);
    r.ppl_se = r.ppl * nll.standard_error;
    r.ppl_diff = r.ppl - std::exp(MeanOverChunks(reference_nll_).mean);
    r.prompt_tok_s = Rate(prompt_tokens_, prompt_seconds_);
    r.decode_tok_s = Rate(scored_tokens_, scored_seconds_);
    return r;
  }

 private:
  static double Mean(const std::vector<float>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0) /
           static_cast<double>(std::max<size_t>(1, values.size()));
  }

  std::vector<double> chunk_kl_, chunk_nll_, reference_nll_;
  std::vector<float> kl_;
  int64_t same_top_ = 0;
  CacheSize size_;
  int64_t prompt_tokens_ = 0, scored_tokens_ = 0;
  double prompt_seconds_ = 0, scored_seconds_ = 0;
};

const Cell* Find(const CellMap& cells, const std::string& cache, int64_t chunk) {
  const auto found = cells.find({cache, chunk});
  return found == cells.end() ? nullptr : &found->second;
}

bool HasAny(const CellMap& cells, const std::string& cache, int64_t chunks) {
  for (int64_t c = 0; c < chunks; ++c) {
    if (Find(cells, cache, c) != nullptr) return true;
  }
  return false;
}

// "-" for what is not known.
std::string Number(double value, int width, int digits) {
  if (std::isnan(value)) return fmt::format(" {:>{}}", "-", width);
  return fmt::format(" {:>{}.{}f}", value, width, digits);
}

// Divergences below 0.001 with their leading digits.
std::string Nats(double value, int digits) {
  if (value > 0 && value < 9.995e-4) return fmt::format(" {:>8.2e}", value);
  return Number(value, 8, digits);
}

}  // namespace

EvalResults SumUp(const std::vector<EvalRow>& rows, const CellMap& cells, int64_t chunks) {
  EvalResults results;
  std::vector<EvalRow> measured;
  for (const EvalRow& row : rows) {
    (HasAny(cells, row.resolved, chunks) ? measured : results.unmeasured).push_back(row);
  }
  std::vector<RowSum> sums(measured.size());
  for (int64_t c = 0; c < chunks; ++c) {
    // Rows are compared on the same tokens: a chunk that one of them lacks counts for none.
    const Cell* reference = Find(cells, kReferenceCell, c);
    const bool whole = reference != nullptr &&
                       std::all_of(measured.begin(), measured.end(), [&](const EvalRow& row) {
                         return Find(cells, row.resolved, c) != nullptr;
                       });
    if (!whole || measured.empty()) continue;
    ++results.chunks;
    for (size_t r = 0; r < measured.size(); ++r) {
      sums[r].Add(*Find(cells, measured[r].resolved, c), *reference);
    }
  }
  if (results.chunks == 0) return {{}, rows, 0};
  for (size_t r = 0; r < measured.size(); ++r) {
    results.rows.push_back(sums[r].Result(measured[r]));
  }
  return results;
}

std::string ToTable(const EvalResults& results) {
  size_t name = 5;
  for (const RowResult& r : results.rows) name = std::max(name, r.row.cache.size());
  std::string text = fmt::format(
      "{:<{}} {:>6} {:>6} {:>6} {:>5} {:>7} {:>8} {:>8} {:>8} {:>8} {:>6} {:>9} {:>7} {:>9} {:>8} "
      "{:>8}\n",
      "cache", name, "code", "stored", "at 32k", "exact", "MiB", "KL", "+-", "median", "99.9%",
      "top1 %", "ppl", "+-", "diff", "prompt/s", "decode/s");
  for (const RowResult& r : results.rows) {
    text += fmt::format("{:<{}}", r.row.cache, name);
    text += Number(r.code_bits, 6, 3) + Number(r.stored_bits, 6, 3) +
            Number(r.stored_bits_at_32k, 6, 3) + Number(r.exact_tokens, 5, 0) +
            Number(r.kv_mib, 7, 2);
    text += Nats(r.kl.mean, 5) + Nats(r.kl.standard_error, 5) + Nats(r.kl_median, 5) +
            Nats(r.kl_p999, 4) + Number(100 * r.top1, 6, 2);
    text += Number(r.ppl, 9, 4) + Number(r.ppl_se, 7, 3) + Number(r.ppl_diff, 9, 4) +
            Number(r.prompt_tok_s, 8, 1) + Number(r.decode_tok_s, 8, 1) + "\n";
  }
  return text;
}

nlohmann::ordered_json ToJson(const EvalResults& results) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const RowResult& r : results.rows) {
    rows.push_back({{"cache", r.row.cache},
                    {"code_bits", r.code_bits},
                    {"stored_bits_per_element", r.stored_bits},
                    {"stored_bits_at_32k", r.stored_bits_at_32k},
                    {"exact_tokens", r.exact_tokens},
                    {"kv_mib", r.kv_mib},
                    {"kl_mean", r.kl.mean},
                    {"kl_mean_se", r.kl.standard_error},
                    {"kl_median", r.kl_median},
                    {"kl_p999", r.kl_p999},
                    {"top1", r.top1},
                    {"ppl", r.ppl},
                    {"ppl_se", r.ppl_se},
                    {"ppl_diff", r.ppl_diff},
                    {"prompt_tok_s", r.prompt_tok_s},
                    {"decode_tok_s", r.decode_tok_s}});
  }
  return rows;
}

}  // namespace palu::app
