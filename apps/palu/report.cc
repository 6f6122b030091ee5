#include "report.h"

#include <fmt/format.h>

#include <algorithm>

#include "sizes.h"

namespace palu::app {
namespace {

std::string Line(const char* name, const std::string& value) {
  return fmt::format("{:<14}{}\n", name, value);
}

std::string RanksText(const std::vector<int>& ranks) {
  if (ranks.empty()) return "none (no basis)";
  const RankSummary s = Summarise(ranks);
  if (s.max == 0) return "not fitted yet, all tokens are exact";
  return fmt::format("min {}, median {:g}, max {} over {} layers", s.min, s.median, s.max,
                     ranks.size());
}

// ", 5.20x smaller"
std::string ComparedText(int64_t bytes, int64_t fp16_bytes) {
  if (bytes <= 0 || fp16_bytes <= 0) return "";
  const double ratio = static_cast<double>(fp16_bytes) / static_cast<double>(bytes);
  return ratio >= 1 ? fmt::format(", {:.2f}x smaller", ratio)
                    : fmt::format(", {:.2f}x larger", 1 / ratio);
}

std::string SpeedText(double rate) {
  return rate > 0 ? fmt::format("{:.1f} tok/s", rate) : std::string("not measured");
}

}  // namespace

RankSummary Summarise(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  const size_t n = ranks.size();
  return {ranks.front(), ranks.back(), (ranks[(n - 1) / 2] + ranks[n / 2]) / 2.0};
}

std::string ToText(const RunReport& r) {
  const llama::SessionStats& s = r.stats;
  std::string text;
  text += Line("tokens", fmt::format("{} prompt, {} generated ({})", r.prompt_tokens,
                                     r.generated_tokens, r.stop));
  text += Line("KV as fp16", fmt::format("{} ({} tokens)", FormatBytes(s.kv_fp16_bytes), s.tokens));
  text += Line("KV allocated", FormatBytes(s.kv_bytes) + ComparedText(s.kv_bytes, s.kv_fp16_bytes));
  text +=
      Line("bits/element", fmt::format("{:.2f} stored, {:.2f} advertised",
                                       s.stored_bits_per_element, s.advertised_bits_per_element));
  text += Line("rank of K", RanksText(s.rank_k));
  text += Line("rank of V", RanksText(s.rank_v));
  text += Line("speed", fmt::format("prompt {}, generation {}", SpeedText(r.prompt_tok_s),
                                    SpeedText(r.decode_tok_s)));
  text += Line("peak memory", FormatBytes(r.peak_rss_bytes));
  text += Line("cache", r.cache);
  text += Line("kernels", fmt::format("{}, {} threads{}", r.kernels, r.threads,
                                      llama::SharesThreads()
                                          ? ""
                                          : "; attention on one, as this libllama was built "
                                            "without libgomp"));
  return text;
}

nlohmann::ordered_json ToJson(const RunReport& r) {
  const llama::SessionStats& s = r.stats;
  return {
      {"prompt_tokens", r.prompt_tokens},
      {"generated_tokens", r.generated_tokens},
      {"text", r.text},
      {"cache", r.cache},
      {"kv_fp16_bytes", s.kv_fp16_bytes},
      {"kv_bytes", s.kv_bytes},
      {"stored_bits_per_element", s.stored_bits_per_element},
      {"advertised_bits_per_element", s.advertised_bits_per_element},
      {"rank_k", s.rank_k},
      {"rank_v", s.rank_v},
      {"prompt_tok_s", r.prompt_tok_s},
      {"decode_tok_s", r.decode_tok_s},
      {"peak_rss_bytes", r.peak_rss_bytes},
      {"kv_tokens", s.tokens},
      {"stop", r.stop},
      {"model", r.model},
      {"threads", r.threads},
      {"kernels", r.kernels},
  };
}

}  // namespace palu::app
