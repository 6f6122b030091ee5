// From text to options and back, and the checks of options together.
#include "palu/config.h"

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "kernels/kernels.h"
#include "methods/method_table.h"
#include "methods/options.h"
#include "palu/errors.h"

namespace palu {
namespace {

void Require(const KVCacheConfig& c, const char* key, bool ok) {
  if (ok) return;
  const Option& option = FindOption(key);
  Refuse(key, option.get(c), option.allowed);
}

void ApplyPreset(KVCacheConfig& c, const MethodRow& row, std::string_view name) {
  std::vector<std::string> names;
  for (const Preset& preset : row.presets) {
    if (name == preset.name) {
      preset.apply(c);
      return;
    }
    names.push_back(preset.name);
  }
  throw ConfigError(
      "preset '" + std::string(name) + "' of method " + row.name + " is unknown; " +
      (names.empty() ? "the method has none" : "the presets are " + Join(names, ", ")));
}

}  // namespace

KVCacheConfig KVCacheConfig::Parse(std::string_view text) {
  const size_t colon = text.find(':');
  const MethodRow& row = FindMethod(text.substr(0, colon));
  KVCacheConfig config = DefaultConfig(row);
  bool bits_given = false, mixed_given = false, mean_given = false, metric_given = false;
  if (colon != std::string_view::npos) {
    std::vector<std::string_view> parts = Split(text.substr(colon + 1), ',');
    for (size_t i = 0; i < parts.size(); ++i) {
      const size_t equals = parts[i].find('=');
      if (equals == std::string_view::npos) {
        if (i > 0 || parts[i].empty()) {
          throw ConfigError("'" + std::string(parts[i]) + "' in '" + std::string(text) +
                            "' is not key=value; the form is method[:preset][,key=value]...");
        }
        ApplyPreset(config, row, parts[i]);
        continue;
      }
      const std::string_view key = parts[i].substr(0, equals);
      const Option& option = FindOption(key);
      if (!row.takes(key)) {
        std::vector<std::string> keys;
        for (const std::string_view other : Split(row.options, ' ')) keys.emplace_back(other);
        throw ConfigError("option " + std::string(key) + " does not apply to method " + row.name +
                          "; it takes " + Join(keys, ", "));
      }
      option.set(option, config, parts[i].substr(equals + 1));
      bits_given |= key == "bits";
      mean_given |= key == "key_mean";
      metric_given |= key == "key_metric";
      mixed_given |= key == "hi_bit" || key == "lo_bit" || key == "hi_fraction";
    }
  }
  // A mean can be turned only where keys are un-rotated; the queries in a file are there to be
  // used.
  if (config.key_fit == KeyFit::kPrompt && !mean_given) config.key_mean = KeyMean::kFixed;
  if (config.basis == BasisKind::kFile && !metric_given) config.key_metric = KeyMetric::kQueries;
  // Whoever names hi_bit, lo_bit or hi_fraction means the mixed plan.
  if (mixed_given && !bits_given) config.bit_plan = BitPlan::kMixed;
  if (mixed_given && bits_given && config.bit_plan == BitPlan::kAuto) {
    throw ConfigError(
        "options hi_bit, lo_bit and hi_fraction belong to bits=mixed, given was bits=" +
        FindOption("bits").get(config));
  }
  config.Validate();
  return config;
}

void KVCacheConfig::Validate() const {
  const MethodRow& row = FindMethod(method);
  Require(*this, "rank", !rank || *rank >= 1);
  Require(*this, "energy_threshold", energy_threshold > 0 && energy_threshold <= 1);
  Require(*this, "n_head_groups", n_head_groups >= 1);
  Require(*this, "joint_heads", joint_heads >= 1);
  Require(*this, "fit_tokens", fit_tokens >= -1 && fit_tokens <= (1 << 20));
  Require(*this, "bits", bit_plan != BitPlan::kAuto || (auto_bits >= 0.25 && auto_bits <= 8));
  Require(*this, "bits", bit_plan != BitPlan::kUniform || (uniform_bits >= 1 && uniform_bits <= 8));
  const double least = auto_bits - std::abs(key_extra), largest = auto_bits + std::abs(key_extra);
  Require(*this, "key_extra",
          std::abs(key_extra) <= 4 &&
              (bit_plan != BitPlan::kAuto || key_extra == 0 || (least >= 0.25 && largest <= 8)));
  Require(*this, "hi_bit", hi_bit >= 1 && hi_bit <= 8);
  Require(*this, "lo_bit", lo_bit >= 1 && lo_bit <= 8);
  Require(*this, "hi_fraction", hi_fraction >= 0 && hi_fraction <= 1);
  Require(*this, "group_size",
          group_size == 8 || group_size == 16 || group_size == 32 || group_size == 64 ||
              group_size == 128);
  Require(*this, "sink_tokens", sink_tokens >= 0 && sink_tokens <= 4096);
  Require(*this, "recent_tokens", recent_tokens >= 0 && recent_tokens <= 65536);
  Require(*this, "fast", !fast || Active().byte_products);
  Require(*this, "windowed_bits", windowed_bits == 8 || windowed_bits == 16);
  Require(*this, "max_bytes", max_bytes >= 0);
  if (bit_plan == BitPlan::kMixed && lo_bit > hi_bit) {
    throw ConfigError("options lo_bit=" + std::to_string(lo_bit) +
                      " and hi_bit=" + std::to_string(hi_bit) +
                      " contradict each other; lo_bit must be at most hi_bit");
  }
  // Only latents along principal axes differ enough to be given different bits.
  const int most = row.keys.codec == Codec::kSigns ? 4 : 8;
  const bool equal = row.encodes() && row.keys.transform != Transform::kLowRank;
  if (equal && (bit_plan != BitPlan::kUniform || uniform_bits > most)) {
    throw ConfigError("option bits=" + FindOption("bits").get(*this) +
                      " does not apply to method " + row.name +
                      "; it must be a whole number from 1 to " + std::to_string(most));
  }
  Require(*this, "basis", basis != BasisKind::kFile || !basis_file.empty());
  Require(*this, "key_metric", key_metric == KeyMetric::kPlain || basis == BasisKind::kFile);
  Require(*this, "key_mean", key_mean == KeyMean::kFixed || key_fit == KeyFit::kAveraged);
  const bool ordered = basis == BasisKind::kFit || basis == BasisKind::kFile;
  if (!ordered && (rank || bit_plan == BitPlan::kMixed || bit_plan == BitPlan::kSchedule)) {
    throw ConfigError(
        "options rank, bits=mixed and bits=schedule need a fitted basis, given was basis=" +
        FindOption("basis").get(*this));
  }
}

void KVCacheConfig::ValidateFor(int head_dim) const {
  Validate();
  if (rank && *rank > head_dim) {
    Refuse("rank", std::to_string(*rank),
           "from 1 to head_dim, which is " + std::to_string(head_dim) + " here");
  }
}

bool KVCacheConfig::Encodes() const { return FindMethod(method).encodes(); }

// A run with `only` measures what one side of one layer costs: all others stay exact.
bool KVCacheConfig::EncodesWindows() const {
  return FindMethod(method).takes("windowed_bits") && windowed_bits == 8 && only.layer < 0;
}

bool KVCacheConfig::HasBasis() const {
  return FindMethod(method).keys.transform == Transform::kLowRank;
}

std::string KVCacheConfig::ToString() const {
  const MethodRow& row = FindMethod(method);
  const KVCacheConfig defaults = DefaultConfig(row);
  std::string text = method;
  const char* separator = ":";
  for (const Option& option : Options()) {
    const std::string value = option.get(*this);
    const std::string_view key = option.key;
    const bool mixed_only = key == "hi_bit" || key == "lo_bit" || key == "hi_fraction";
    if (!row.takes(key) || (mixed_only && bit_plan != BitPlan::kMixed)) continue;
    // What Parse would set by itself is written out too.
    const bool always = mixed_only || key == "bits" ||
                        (key == "key_metric" && basis == BasisKind::kFile) ||
                        (key == "key_mean" && key_fit == KeyFit::kPrompt);
    if (value == option.get(defaults) && !always) continue;
    text += separator + std::string(key) + "=" + value;
    separator = ",";
  }
  return text;
}

std::string DescribeOptions() {
  const KVCacheConfig defaults;
  std::string text;
  for (const Option& option : Options()) {
    char line[320];
    std::snprintf(line, sizeof(line), "%-17s %-9s %s; %s\n", option.key,
                  option.get(defaults).c_str(), option.meaning, option.allowed);
    text += line;
  }
  return text;
}

}  // namespace palu
