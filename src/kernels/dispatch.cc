// Which kernels run: the best target that this CPU has, or the one that the environment variable
// PALU_TARGET names.
#include <cstdlib>
#include <string>
#include <vector>

#include "palu/errors.h"
// clang-format off
#include "kernels/targets.h"
#include "hwy/targets.h"
// clang-format on

namespace palu {
namespace {

// Best first. A target is here if it was compiled and this CPU has it.
std::vector<KernelTable> MakeTables() {
  std::vector<KernelTable> tables;
  for (const int64_t target : {HWY_AVX3_DL, HWY_AVX3, HWY_AVX2, HWY_SSE4, HWY_NEON}) {
    if ((hwy::SupportedTargets() & target) == 0) continue;
    KernelTable table = {};
    table.name = hwy::TargetName(target);
    const bool compiled = AddScore(target, table) && AddAccumulate(target, table) &&
                          AddWaves(target, table) && AddDecode(target, table) &&
                          AddEncode(target, table) && AddGemm(target, table) &&
                          AddProject(target, table) && AddVectorOps(target, table);
    if (compiled) tables.push_back(table);
  }
  return tables;
}

const std::vector<KernelTable>& Tables() {
  static const std::vector<KernelTable> tables = MakeTables();
  return tables;
}

const KernelTable& Choose() {
  const char* wanted = std::getenv("PALU_TARGET");
  const std::vector<const KernelTable*> all = AllKernels();
  if (wanted == nullptr || *wanted == '\0') return all.size() > 1 ? *all[1] : *all[0];
  std::string names;
  for (const KernelTable* table : all) {
    if (std::string(wanted) == table->name) return *table;
    names += names.empty() ? table->name : std::string(", ") + table->name;
  }
  throw ConfigError("PALU_TARGET is \"" + std::string(wanted) + "\"; this CPU runs " + names);
}

}  // namespace

const KernelTable& Active() {
  static const KernelTable& chosen = Choose();
  return chosen;
}

std::vector<const KernelTable*> AllKernels() {
  std::vector<const KernelTable*> all = {&Reference()};
  for (const KernelTable& table : Tables()) all.push_back(&table);
  return all;
}

}  // namespace palu
