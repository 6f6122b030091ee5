// File: abi_measure.h - the layout of the running ggml's objects, measured on objects of its own.
#ifndef PALU_ADAPTERS_GGML_ABI_MEASURE_H_
#define PALU_ADAPTERS_GGML_ABI_MEASURE_H_

#include <functional>
#include <string>
#include <variant>

#include "abi.h"
#include "abi_layout.h"

namespace palu::ggml {

using Lookup = std::function<void*(const char* name)>;

// What tells the rows of the table apart, as the running ggml has it. -1: not found where it could
// be in any known release.
struct Measured {
  int api_version = -1;
  int buffer_buft = -1, backend_device = -1, device_reg = -1, buft_device = -1;
  int caps_byte = -1;
  bool mmap_support = false;
  // "API 2, buffer 11, backend 17, ..." for an error message.
  std::string Text() const;
};

// Measures. The string is the error: a missing function, by name, or no CPU backend to measure.
// Cost: makes and frees a CPU buffer of 64 bytes and a CPU backend.
std::variant<Measured, std::string> Measure(const Lookup& lookup);

// The row that agrees with what was measured; null: none does.
const Layout* MatchLayout(const Measured& measured);

// Checks ggml_tensor and the prefix of ggml_cgraph on a graph that the running ggml makes, and
// finds out whether it flags the nodes to compute: the flag, or 0. The string is the error.
std::variant<int32_t, std::string> CheckTensors(const Lookup& lookup, const Ops& ops);

}  // namespace palu::ggml

#endif  // PALU_ADAPTERS_GGML_ABI_MEASURE_H_
