#include "methods/method_table.h"

#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "palu/errors.h"
#include "palu/methods.h"

namespace palu {
namespace {

// What the reference ships (docs/method.md): fitted on the rotated keys of whatever comes first,
// nothing kept exact.
void ApplyReference(KVCacheConfig& c) {
  c.energy_threshold = 0.90;
  c.energy_rule = EnergyRule::kSum;
  c.rank_policy = RankPolicy::kMin;
  c.key_fit = KeyFit::kPrompt;
  c.fit_tokens = 0;
  c.bit_plan = BitPlan::kMixed;
  c.hi_bit = 4;
  c.lo_bit = 2;
  c.hi_fraction = 0.25;
  c.scales = ScaleFormat::kMinMax;
  c.group_size = 32;
  c.sink_tokens = 0;
  c.recent_tokens = 0;
}

constexpr Preset kPaluPresets[] = {{"reference", ApplyReference}};

constexpr MethodRow kTable[] = {
    {"fp32",
     {Transform::kIdentity, Codec::kF32, "as they are, 32 bits"},
     {Transform::kIdentity, Codec::kF32, "as they are, 32 bits"},
     {}},
    {"fp16",
     {Transform::kIdentity, Codec::kF16, "as they are, 16 bits"},
     {Transform::kIdentity, Codec::kF16, "as they are, 16 bits"},
     {}},
    {"palu",
     {Transform::kLowRank, Codec::kScalar, "latents of a basis per head group, packed codes"},
     {Transform::kLowRank, Codec::kScalar, "the same, or fp16 latents"},
     kPaluPresets},
};

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
