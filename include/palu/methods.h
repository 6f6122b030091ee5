// File: methods.h - the method table and the presets, for listings.
#ifndef PALU_METHODS_H_
#define PALU_METHODS_H_

#include <string>
#include <vector>

namespace palu {

struct MethodInfo {
  std::string name;                  // "fp16", "palu", ...
  std::string keys;                  // what happens to keys, in a few words
  std::string values;                // and to values
  std::vector<std::string> presets;  // "reference", ...
};

// The rows of the table, in its order.
std::vector<MethodInfo> ListMethods();

// Name of the SIMD target that the kernels run on here, e.g. "AVX3"; PALU_TARGET=NAME in the
// environment forces one (an unknown or unsupported name is a ConfigError at the first use).
std::string KernelTarget();
// Every target that this build has and this CPU can run, best first.
std::vector<std::string> SupportedKernelTargets();

}  // namespace palu

#endif  // PALU_METHODS_H_
