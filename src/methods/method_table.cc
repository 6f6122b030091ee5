#include "methods/method_table.h"

#include <string>
#include <vector>

#include "base/text.h"
#include "kernels/kernels.h"
#include "palu/errors.h"
#include "palu/methods.h"

namespace palu {
namespace {

constexpr int kEveryHead = 1 << 20;  // head groups: clamped to the heads

// What the reference ships (docs/method.md): fitted on the rotated keys of whatever comes first,
// nothing kept exact.
void ApplyReference(KVCacheConfig& c) {
  c.energy_threshold = 0.90;
  c.energy_rule = EnergyRule::kSum;
  c.rank_policy = RankPolicy::kMin;
  c.key_fit = KeyFit::kPrompt;
  c.key_mean = KeyMean::kFixed;
  c.fit_tokens = 0;
  c.bit_plan = BitPlan::kMixed;
  c.hi_bit = 4;
  c.lo_bit = 2;
  c.hi_fraction = 0.25;
  c.scales = ScaleFormat::kMinMax;
  c.group_size = 32;
  c.sink_tokens = 0;
  c.recent_tokens = 0;
  c.windowed_bits = 16;
}

// All siblings share the min/max quantiser over 32 tokens and wait exactly for full groups.
void MinMaxDefaults(KVCacheConfig& c) {
  c.scales = ScaleFormat::kMinMax;
  c.group_size = 32;
  c.bit_plan = BitPlan::kUniform;
  c.uniform_bits = 2;
  c.key_fit = KeyFit::kPrompt;
  c.key_mean = KeyMean::kFixed;
  c.fit_tokens = 0;
  c.sink_tokens = 0;
  c.recent_tokens = 0;
}

// arXiv 2402.02750: the last `residual_length` tokens stay exact.
void KiviDefaults(KVCacheConfig& c) {
  MinMaxDefaults(c);
  c.recent_tokens = 128;
}

// arXiv 2502.15304.
void SvdqDefaults(KVCacheConfig& c) {
  MinMaxDefaults(c);
  c.bit_plan = BitPlan::kSchedule;
  c.energy_threshold = 0.95;
  c.n_head_groups = kEveryHead;
}

// arXiv 2405.12497.
void RabitqDefaults(KVCacheConfig& c) {
  MinMaxDefaults(c);
  c.uniform_bits = 1;
  c.n_head_groups = kEveryHead;
}

// As llama.cpp stores them: no window.
void BlockDefaults(KVCacheConfig& c) {
  MinMaxDefaults(c);
  c.uniform_bits = 8;
}

// Pages of 32 tokens, as the exact ones: what leaves the window is dropped page by page.
void WindowedDefaults(KVCacheConfig& c) {
  MinMaxDefaults(c);
  c.uniform_bits = 8;
}

constexpr char kBlockOptions[] = "sink_tokens recent_tokens max_bytes";
constexpr char kUniformOptions[] = "bits group_size sink_tokens recent_tokens fast max_bytes";
constexpr char kSvdqOptions[] =
    "bits rank energy_threshold energy_rule key_fit fit_tokens group_size sink_tokens "
    "recent_tokens fast max_bytes";
constexpr char kRabitqOptions[] = "bits key_fit fit_tokens sink_tokens recent_tokens max_bytes";

// The measured front (docs/decisions/0005-codec.md): the default is balanced.
// Both stay below 3.1 and 6.5 bits with everything that a sequence owns at 32,768 tokens.
void ApplySmall(KVCacheConfig& c) {
  c.auto_bits = 2.95;
  c.group_size = 64;
}

// Above 5 bits fp16 zeros over long groups beat 8-bit scales.
void ApplyQuality(KVCacheConfig& c) {
  c.auto_bits = 6.3;
  c.scales = ScaleFormat::kMinMax;
  c.group_size = 128;
}

constexpr Preset kPaluPresets[] = {
    {"small", ApplySmall}, {"quality", ApplyQuality}, {"reference", ApplyReference}};

constexpr MethodRow kTable[] = {
    {"fp32",
     {Transform::kIdentity, Codec::kF32, "as they are, 32 bits"},
     {Transform::kIdentity, Codec::kF32, "as they are, 32 bits"},
     nullptr,
     "max_bytes",
     {}},
    {"fp16",
     {Transform::kIdentity, Codec::kF16, "as they are, 16 bits"},
     {Transform::kIdentity, Codec::kF16, "as they are, 16 bits"},
     nullptr,
     "max_bytes",
     {}},
    {"palu",
     {Transform::kLowRank, Codec::kScalar, "latents of a basis per head group, packed codes"},
     {Transform::kLowRank, Codec::kScalar, "the same, or fp16 latents", 0, true},
     nullptr,
     "*",
     kPaluPresets},
    {"uniform",
     {Transform::kIdentity, Codec::kScalar, "codes per channel and 32 tokens"},
     {Transform::kIdentity, Codec::kScalar, "the same"},
     MinMaxDefaults,
     kUniformOptions,
     {}},
    {"kivi",
     {Transform::kIdentity, Codec::kScalar, "codes per channel and 32 tokens"},
     {Transform::kIdentity, Codec::kTokenScalar, "codes per token and 32 channels"},
     KiviDefaults,
     kUniformOptions,
     {}},
    {"q8_0",
     {Transform::kTurn, Codec::kTokenBlock, "rotated, ggml's q8_0 blocks", 8},
     {Transform::kTurn, Codec::kTokenBlock, "the same", 8},
     BlockDefaults,
     kBlockOptions,
     {}},
    {"q8_0/q4_0",
     {Transform::kTurn, Codec::kTokenBlock, "rotated, ggml's q8_0 blocks", 8},
     {Transform::kTurn, Codec::kTokenBlock, "rotated, ggml's q4_0 blocks", 4},
     BlockDefaults,
     kBlockOptions,
     {}},
    {"q4_0",
     {Transform::kTurn, Codec::kTokenBlock, "rotated, ggml's q4_0 blocks", 4},
     {Transform::kTurn, Codec::kTokenBlock, "the same", 4},
     BlockDefaults,
     kBlockOptions,
     {}},
    {"svdq",
     {Transform::kLowRank, Codec::kScalar, "latents of a basis per head, 8/4/2/1/1/0/0/0 bits"},
     {Transform::kIdentity, Codec::kF16, "as they are, 16 bits"},
     SvdqDefaults,
     kSvdqOptions,
     {}},
    {"rabitq",
     {Transform::kRotation, Codec::kSigns, "centred, rotated, signs and two factors per token"},
     {Transform::kIdentity, Codec::kTokenScalar, "4-bit codes per token and 32 channels", 4},
     RabitqDefaults,
     kRabitqOptions,
     {}},
};

constexpr MethodRow kWindowed = {
    "",
    {Transform::kIdentity, Codec::kScalar, "8-bit codes per channel and 32 tokens", 8},
    {Transform::kIdentity, Codec::kScalar, "the same", 8},
    WindowedDefaults,
    "",
    {}};

}  // namespace

std::span<const MethodRow> MethodTable() { return kTable; }

const MethodRow& FindMethod(std::string_view name) {
  std::string names;
  for (const MethodRow& row : kTable) {
    if (name == row.name) return row;
    names += std::string(names.empty() ? "" : ", ") + row.name;
  }
  throw ConfigError("method '" + std::string(name) + "' is unknown; the methods are " + names);
}

const MethodRow& WindowedMethod() { return kWindowed; }

bool MethodRow::takes(std::string_view option) const {
  if (std::string_view(options) == "*") return true;
  for (const std::string_view key : Split(options, ' ')) {
    if (key == option) return true;
  }
  return false;
}

KVCacheConfig DefaultConfig(const MethodRow& row) {
  KVCacheConfig config;
  config.method = row.name;
  if (!row.takes("windowed_bits")) config.windowed_bits = 16;
  if (row.defaults) row.defaults(config);
  return config;
}

std::vector<MethodInfo> ListMethods() {
  std::vector<MethodInfo> list;
  for (const MethodRow& row : kTable) {
    MethodInfo info{row.name, row.keys.text, row.values.text, {}};
    for (const Preset& preset : row.presets) info.presets.push_back(preset.name);
    list.push_back(std::move(info));
  }
  return list;
}

std::string KernelTarget() { return Active().name; }

std::vector<std::string> SupportedKernelTargets() {
  std::vector<std::string> names;
  for (const KernelTable* table : AllKernels()) {
    if (table != &Reference()) names.push_back(table->name);
  }
  return names;
}

}  // namespace palu
