// File: abi_cpu.h - single operations run by the host's own CPU backend.
#ifndef PALU_ADAPTERS_GGML_ABI_CPU_H_
#define PALU_ADAPTERS_GGML_ABI_CPU_H_

#include <memory>

#include "abi.h"

namespace palu::ggml {

// A private CPU backend of the host, for operations on plain memory that a plug-in has no code for.
// One thread at a time.
class CpuRunner {
 public:
  // Null: the host has no CPU backend, or no memory.
  static std::unique_ptr<CpuRunner> Make(const Host& host);
  ~CpuRunner();
  CpuRunner(const CpuRunner&) = delete;
  CpuRunner& operator=(const CpuRunner&) = delete;

  // Whether the backend has code for the operation; asks nothing about where its data lie.
  bool Supports(const ggml_tensor* op) const;
  // Runs one node. Its data and those of its sources must be host memory; its flag to be computed
  // is set. Cost: some 10 us beside the operation.
  ggml_status Compute(ggml_tensor* node);
  void SetThreads(int threads);

 private:
  struct Parts;
  explicit CpuRunner(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace palu::ggml

#endif  // PALU_ADAPTERS_GGML_ABI_CPU_H_
