// One row per option; adding one is a field in KVCacheConfig and a row here.
#include "methods/options.h"

#include <utility>

#include "base/text.h"
#include "palu/errors.h"

namespace palu {

void Refuse(std::string_view option, std::string_view value, std::string_view allowed) {
  throw ConfigError("option " + std::string(option) + "=" + std::string(value) +
                    " is not allowed; it must be " + std::string(allowed));
}

namespace {

template <class T>
T Number(const Option& option, std::string_view text) {
  const auto value = ParseNumber<T>(text);
  if (!value) Refuse(option.key, text, option.allowed);
  return *value;
}

// An option that is a plain number in the config.
template <class T>
Option NumberOption(const char* key, const char* meaning, const char* allowed,
                    T KVCacheConfig::*field) {
  return {key, meaning, allowed,
          [field](const Option& o, KVCacheConfig& c, std::string_view text) {
            c.*field = Number<T>(o, text);
          },
          [field](const KVCacheConfig& c) { return NumberText(c.*field); }};
}

// An option with named values.
template <class E>
Option EnumOption(const char* key, const char* meaning, const char* allowed,
                  E KVCacheConfig::*field, std::vector<std::pair<const char*, E>> names) {
  return {key, meaning, allowed,
          [field, names](const Option& o, KVCacheConfig& c, std::string_view text) {
            for (const auto& [name, value] : names) {
              if (text == name) {
                c.*field = value;
                return;
              }
            }
            Refuse(o.key, text, o.allowed);
          },
          [field, names](const KVCacheConfig& c) -> std::string {
            for (const auto& [name, value] : names) {
              if (c.*field == value) return name;
            }
            return "?";
          }};
}

void SetRank(const Option& o, KVCacheConfig& c, std::string_view text) {
  if (text == "none") {
    c.rank.reset();
  } else {
    c.rank = Number<int>(o, text);
  }
}

void SetBasis(const Option& o, KVCacheConfig& c, std::string_view text) {
  if (text.empty()) Refuse(o.key, text, o.allowed);
  c.basis = text == "fit"        ? BasisKind::kFit
            : text == "none"     ? BasisKind::kNone
            : text == "hadamard" ? BasisKind::kHadamard
                                 : BasisKind::kFile;
  c.basis_file = c.basis == BasisKind::kFile ? std::string(text) : "";
}

std::string GetBasis(const KVCacheConfig& c) {
  switch (c.basis) {
    case BasisKind::kFile:
      return c.basis_file;
    case BasisKind::kNone:
      return "none";
    case BasisKind::kHadamard:
      return "hadamard";
    case BasisKind::kFit:
      break;
  }
  return "fit";
}

void SetOnly(const Option& o, KVCacheConfig& c, std::string_view text) {
  c.only = {};
  if (text == "none") return;
  const char side = text.empty() ? ' ' : text.back();
  const auto layer = ParseNumber<int>(text.substr(0, text.empty() ? 0 : text.size() - 1));
  if (!layer || *layer < 0 || (side != 'k' && side != 'v')) Refuse(o.key, text, o.allowed);
  c.only = {*layer, side == 'v'};
}

std::string GetOnly(const KVCacheConfig& c) {
  return c.only.layer < 0 ? "none" : std::to_string(c.only.layer) + (c.only.values ? "v" : "k");
}

void SetBits(const Option& o, KVCacheConfig& c, std::string_view text) {
  if (text == "mixed") {
    c.bit_plan = BitPlan::kMixed;
    return;
  }
  if (text == "schedule") {
    c.bit_plan = BitPlan::kSchedule;
    return;
  }
  if (const auto bits = ParseNumber<int>(text)) {
    c.bit_plan = BitPlan::kUniform;
    c.uniform_bits = *bits;
    return;
  }
  if (!text.starts_with("auto:")) Refuse(o.key, text, o.allowed);
  const auto budget = ParseNumber<double>(text.substr(5));
  if (!budget) Refuse(o.key, text, o.allowed);
  c.bit_plan = BitPlan::kAuto;
  c.auto_bits = *budget;
}

std::string GetBits(const KVCacheConfig& c) {
  switch (c.bit_plan) {
    case BitPlan::kMixed:
      return "mixed";
    case BitPlan::kSchedule:
      return "schedule";
    case BitPlan::kUniform:
      return std::to_string(c.uniform_bits);
    case BitPlan::kAuto:
      break;
  }
  return "auto:" + NumberText(c.auto_bits);
}

void SetBytes(const Option& o, KVCacheConfig& c, std::string_view text) {
  int64_t unit = 1;
  std::string_view digits = text;
  if (!text.empty()) {
    const char suffix = text.back();
    unit = suffix == 'K' ? 1 << 10 : suffix == 'M' ? 1 << 20 : suffix == 'G' ? 1 << 30 : 1;
    if (unit > 1) digits.remove_suffix(1);
  }
  const auto value = ParseNumber<double>(digits);
  if (!value || !(*value >= 0) || *value * static_cast<double>(unit) > 9e18)
    Refuse(o.key, text, o.allowed);
  c.max_bytes = static_cast<int64_t>(*value * static_cast<double>(unit));
}

}  // namespace

const std::vector<Option>& Options() {
  using C = KVCacheConfig;
  static const std::vector<Option> options = {
      {"basis",
       "axes of the latents: fitted on the first tokens, from a file of `palu fit`, the plain "
       "channels, or a random rotation",
       "fit, the path of a file, none or hadamard", SetBasis, GetBasis},
      EnumOption("key_metric", "keys are fitted for small errors of their own, or of the scores",
                 "queries with basis=FILE, or plain", &C::key_metric,
                 {{"plain", KeyMetric::kPlain}, {"queries", KeyMetric::kQueries}}),
      {"rank", "channels kept per head group; none = by energy_threshold",
       "none or a whole number from 1 to head_dim", SetRank,
       [](const C& c) { return c.rank ? std::to_string(*c.rank) : "none"; }},
      NumberOption("energy_threshold", "share of the spectrum's energy kept (1 = full rank)",
                   "a number above 0 and at most 1", &C::energy_threshold),
      EnumOption("energy_rule", "energy is the sum of singular values, or of their squares",
                 "sum or squares", &C::energy_rule,
                 {{"sum", EnergyRule::kSum}, {"squares", EnergyRule::kSquares}}),
      EnumOption("rank_policy", "how head groups agree on a rank", "min, max or per_group",
                 &C::rank_policy,
                 {{"min", RankPolicy::kMin},
                  {"max", RankPolicy::kMax},
                  {"per_group", RankPolicy::kPerGroup}}),
      NumberOption("n_head_groups", "groups of KV heads that share a basis (clamped to the heads)",
                   "a whole number of at least 1", &C::n_head_groups),
      NumberOption("joint_heads",
                   "KV heads that are projected together, on axes of all their channels",
                   "a whole number of at least 1", &C::joint_heads),
      EnumOption("key_fit",
                 "moments of the keys as they came, or un-rotated and averaged over positions",
                 "prompt or averaged", &C::key_fit,
                 {{"prompt", KeyFit::kPrompt}, {"averaged", KeyFit::kAveraged}}),
      EnumOption("key_mean",
                 "the mean taken from keys: one for all, or one turned to each key's position",
                 "rotated with key_fit=averaged, or fixed", &C::key_mean,
                 {{"fixed", KeyMean::kFixed}, {"rotated", KeyMean::kRotated}}),
      NumberOption("fit_tokens",
                   "fit on the first so many tokens; -1 = 8 head_dim (plug-in: up to 2048), 0 = "
                   "the first append",
                   "a whole number from -1 to 1048576", &C::fit_tokens),
      EnumOption("quantize_values", "false keeps the latents of V in fp16", "true or false",
                 &C::quantize_values, {{"true", true}, {"false", false}}),
      {"bits",
       "bits per channel: water-filling for a budget of codes + scales, hi_bit/lo_bit, the same "
       "everywhere, or SVDq's",
       "auto:B with 0.25 <= B <= 8, mixed, a whole number from 1 to 8, or schedule", SetBits,
       GetBits},
      EnumOption("budgets", "bits=auto: shared among layers and sides by the costs in basis=FILE",
                 "layers or equal", &C::budgets,
                 {{"layers", Budgets::kLayers}, {"equal", Budgets::kEqual}}),
      NumberOption("key_extra", "bits per element moved from values to keys (bits=auto)",
                   "a number from -4 to 4 that leaves both sides 0.25 to 8 bits", &C::key_extra),
      NumberOption("hi_bit", "bits of the leading channels (bits=mixed)",
                   "a whole number from 1 to 8", &C::hi_bit),
      NumberOption("lo_bit", "bits of the other channels (bits=mixed)",
                   "a whole number from 1 to 8 and at most hi_bit", &C::lo_bit),
      NumberOption("hi_fraction", "share of channels at hi_bit (bits=mixed)",
                   "a number from 0 to 1", &C::hi_fraction),
      EnumOption("scales", "fp16 scale and zero, or one 8-bit logarithmic scale", "minmax or log8",
                 &C::scales, {{"minmax", ScaleFormat::kMinMax}, {"log8", ScaleFormat::kLog8}}),
      NumberOption("group_size", "tokens that share a scale", "8, 16, 32, 64 or 128",
                   &C::group_size),
      NumberOption("sink_tokens", "first tokens kept exact", "a whole number from 0 to 4096",
                   &C::sink_tokens),
      NumberOption("recent_tokens", "last tokens kept exact, at least",
                   "a whole number from 0 to 65536", &C::recent_tokens),
      EnumOption("fast",
                 "attention with integers of 8 bits instead of 16 (see docs/performance.md)",
                 "true, on a CPU with products of four bytes, or false", &C::fast,
                 {{"false", false}, {"true", true}}),
      NumberOption("windowed_bits", "bits of tokens in layers with a sliding window (16 = exact)",
                   "8 or 16", &C::windowed_bits),
      {"only", "encode only the keys or the values of one layer: a control",
       "none, or a layer and k or v, such as 12k", SetOnly, GetOnly},
      {"max_bytes", "limit of all caches of a model together, 0 = none",
       "a size such as 0, 500000, 200M or 1.5G", SetBytes,
       [](const C& c) { return std::to_string(c.max_bytes); }},
  };
  return options;
}

const Option& FindOption(std::string_view key) {
  std::vector<std::string> keys;
  for (const Option& option : Options()) {
    if (key == option.key) return option;
    keys.push_back(option.key);
  }
  throw ConfigError("option '" + std::string(key) + "' is unknown; the options are " +
                    Join(keys, ", "));
}

}  // namespace palu
