#include "ggml/device.h"

#include <atomic>

#include "ggml/kv_buffer.h"
#include "ggml/ops.h"
#include "ggml/report.h"

namespace palu::ggml {
namespace {

class PaluBackend : public Backend {
 public:
  PaluBackend(const Host& host, bool shares_threads) : host_(host) {
    threads_.shared = shares_threads;
  }

  ggml_status Compute(std::span<ggml_tensor* const> nodes) override {
    for (ggml_tensor* node : nodes) {
      const ggml_status status = Run(host_, node, threads_);
      if (status != GGML_STATUS_SUCCESS) return status;
      if (static_cast<int>(node->op) == host_.ops.flash_attn_ext) TellUsed();
    }
    return GGML_STATUS_SUCCESS;
  }
  void SetThreads(int threads) override { threads_.count = threads; }

 private:
  static void TellUsed() {
    static std::atomic<bool> told = false;
    if (!told.exchange(true)) Tell("used", "attention runs on the packed cache");
  }

  const Host& host_;
  Threads threads_;
};

class PaluDevice : public Device {
 public:
  PaluDevice(const Host& host, bool shares_threads)
      : host_(host), shares_threads_(shares_threads) {}

  const char* Name() const override { return "PALU"; }
  const char* Description() const override { return "KV cache of packed latents, on the CPU"; }
  // As much as can be asked for: what a cache takes is known only once it is filled, and a device
  // that seems small gets no layers.
  void Memory(size_t* free, size_t* total) const override { *free = *total = size_t{1} << 40; }
  size_t Alignment() const override { return 4096; }  // a page, to forbid whole tensors
  size_t AllocSize(const ggml_tensor* tensor) const override {
    return host_.functions.nbytes(tensor);
  }
  bool SupportsOp(const ggml_tensor* op) const override { return Supports(host_, op); }
  std::unique_ptr<Buffer> NewBuffer(size_t size) override { return KvBuffer::Make(host_, size); }
  std::unique_ptr<Backend> NewBackend() override {
    return std::make_unique<PaluBackend>(host_, shares_threads_);
  }

 private:
  const Host host_;
  const bool shares_threads_;
};

}  // namespace

std::unique_ptr<Device> MakeDevice(const Host& host, bool shares_threads) {
  return std::make_unique<PaluDevice>(host, shares_threads);
}

}  // namespace palu::ggml
