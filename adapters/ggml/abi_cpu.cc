// File: abi_cpu.cc - single operations run by the host's own CPU backend.
#include "abi_cpu.h"

#include <utility>

namespace palu::ggml {

// A graph of one node, kept for all calls, and the backend that runs it.
struct CpuRunner::Parts {
  Functions f;
  int32_t compute_flag = 0;
  ggml_backend_device* device = nullptr;
  ggml_backend* backend = nullptr;
  ggml_context* ctx = nullptr;
  ggml_cgraph* graph = nullptr;

  ~Parts() {
    if (ctx != nullptr) f.free(ctx);
    if (backend != nullptr) f.backend_free(backend);
  }
};

std::unique_ptr<CpuRunner> CpuRunner::Make(const Host& host) {
  constexpr size_t kNodes = 1;
  auto parts = std::make_unique<Parts>();
  const Functions& f = parts->f = host.functions;
  parts->compute_flag = host.compute_flag;
  parts->device = f.dev_by_type(kCpuDevice);
  if (parts->device == nullptr) return nullptr;
  parts->backend = f.dev_init(parts->device, nullptr);
  parts->ctx = f.init({f.graph_overhead_custom(kNodes, false) + 256, nullptr, true});
  if (parts->backend == nullptr || parts->ctx == nullptr) return nullptr;
  parts->graph = f.new_graph_custom(parts->ctx, kNodes, false);
  return std::unique_ptr<CpuRunner>(new CpuRunner(std::move(parts)));
}

CpuRunner::CpuRunner(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
CpuRunner::~CpuRunner() = default;

bool CpuRunner::Supports(const ggml_tensor* op) const {
  return parts_->f.dev_supports_op(parts_->device, op);
}

ggml_status CpuRunner::Compute(ggml_tensor* node) {
  node->flags |= parts_->compute_flag;
  parts_->f.graph_clear(parts_->graph);
  parts_->f.graph_add_node(parts_->graph, node);
  return static_cast<ggml_status>(parts_->f.graph_compute(parts_->backend, parts_->graph));
}

void CpuRunner::SetThreads(int threads) {
  const Functions& f = parts_->f;
  using SetThreadsFunction = void(ggml_backend*, int);
  void* set = f.reg_proc_address(f.dev_reg(parts_->device), "ggml_backend_set_n_threads");
  if (set != nullptr) reinterpret_cast<SetThreadsFunction*>(set)(parts_->backend, threads);
}

}  // namespace palu::ggml
