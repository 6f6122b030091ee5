// File: abi.h - what palu needs to know of the ggml that runs, whichever generation it is.
//
// A plug-in is loaded into programs built from other releases than the one it was built with, and
// ggml's backend structs are internal: they change without a change of any number that ggml would
// check. So nothing here relies on the header of a release. ProbeHost finds the ggml that is
// loaded, measures the layout of its objects, and picks the row of the table in abi_layout.h that
// agrees; MakeRegistration then fills structs of that row.
//
// Of <ggml.h> only this is used, equal in all releases since 2025-07 and checked when probing:
// ggml_tensor, ggml_type_traits, the numbers of ggml_type, ggml_status and the flags of a tensor.
// Numbers of ops move from release to release; they come from Ops, never from the header.
#ifndef PALU_ADAPTERS_GGML_ABI_H_
#define PALU_ADAPTERS_GGML_ABI_H_

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <variant>

// The handles of <ggml-backend.h>, which is not included: its structs and enums differ.
struct ggml_backend;
struct ggml_backend_buffer;
struct ggml_backend_buffer_type;
struct ggml_backend_device;
struct ggml_backend_reg;

namespace palu::ggml {

struct Layout;  // abi_layout.h

// Numbers of the ops in the running ggml; compare with static_cast<int>(tensor->op).
struct Ops {
  int none = -1, dup = -1, cpy = -1, cont = -1, reshape = -1, view = -1, permute = -1;
  int transpose = -1, get_rows = -1, set_rows = -1, scale = -1, rope = -1, flash_attn_ext = -1;
};

inline constexpr int kCpuDevice = 0;  // GGML_BACKEND_DEVICE_TYPE_CPU

// Functions of the running ggml. None is null after ProbeHost.
struct Functions {
  const char* (*op_name)(int op);
  size_t (*type_size)(int type);
  int64_t (*blck_size)(int type);
  size_t (*row_size)(int type, int64_t ne);
  size_t (*nbytes)(const ggml_tensor*);
  const ggml_type_traits* (*type_traits)(int type);
  bool (*buft_is_host)(ggml_backend_buffer_type*);
  ggml_backend_device* (*dev_by_type)(int type);  // kCpuDevice is the only number that never moved
  bool (*dev_supports_op)(ggml_backend_device*, const ggml_tensor*);
  ggml_backend* (*dev_init)(ggml_backend_device*, const char* params);
  ggml_backend_reg* (*dev_reg)(ggml_backend_device*);
  void* (*reg_proc_address)(ggml_backend_reg*, const char* name);
  int (*graph_compute)(ggml_backend*, ggml_cgraph*);
  void (*backend_free)(ggml_backend*);
  ggml_context* (*init)(ggml_init_params);
  void (*free)(ggml_context*);
  size_t (*graph_overhead_custom)(size_t size, bool grads);
  ggml_cgraph* (*new_graph_custom)(ggml_context*, size_t size, bool grads);
  void (*graph_clear)(ggml_cgraph*);
  void (*graph_add_node)(ggml_cgraph*, ggml_tensor*);
};

// The running ggml. Plain data; valid as long as that ggml is loaded.
struct Host {
  std::string version;             // of ggml, as it says itself: "0.25.3", "0.0.0" before 0.9
  std::string commit;              // or "unknown"
  const Layout* layout = nullptr;  // the generation; name in GenerationName
  Ops ops;
  Functions functions = {};
  // The flag of nodes that are to be computed, or 0 where all of a graph's nodes are. A graph may
  // hold branches that are not taken. Backend::Compute sees only what is to be computed.
  int32_t compute_flag = 0;
};

struct ProbeOptions {
  // An address in the code that called ggml_backend_init, as __builtin_return_address(0) gives it:
  // it tells which ggml asks when a process holds several. Null: the one found first.
  const void* caller = nullptr;
  // Accept a ggml that is newer than all known ones if everything measured agrees with a known one.
  bool allow_newer = false;
  // For tests: replaces the search for symbols.
  std::function<void*(const char* name)> lookup;
};

// Finds out what the running ggml is. Never throws, prints or crashes for a ggml since 2025-07. The
// string is the error, one line: what was found and what is supported. Makes a CPU backend of the
// host for a moment, to measure it. Some 10 us; not while another thread registers backends.
std::variant<Host, std::string> ProbeHost(const ProbeOptions& options = {}) noexcept;

// Of a host, for messages: "2026-08 (ggml 0.20 to 0.25)".
std::string GenerationName(const Host& host);

// What a plug-in is. ggml calls it through the structs of its generation; all calls below come from
// there. Exceptions do not pass through C: those out of New* make the call fail in ggml with its
// own message, all others end the program through std::terminate, as ggml has no way to hear of
// them.

// Memory of one allocation. `tensor` may be a view (tensor->view_src); `offset` and `size` are
// bytes of ggml's own layout of the tensor, from the tensor's data on, in range.
class Buffer {
 public:
  virtual ~Buffer() = default;
  // Where tensors' data pointers start; not null, aligned to Device::Alignment.
  virtual void* Base() = 0;
  // A tensor (or a view) gets its place in the buffer. False: not possible.
  virtual bool InitTensor(ggml_tensor* tensor) = 0;
  virtual void Memset(ggml_tensor* tensor, uint8_t value, size_t offset, size_t size) = 0;
  virtual void Set(ggml_tensor* tensor, const void* data, size_t offset, size_t size) = 0;
  virtual void Get(const ggml_tensor* tensor, void* data, size_t offset, size_t size) = 0;
  // Whole tensors, dst in this buffer. False: ggml copies through Get and Set.
  virtual bool Copy(const ggml_tensor* src, ggml_tensor* dst) = 0;
  virtual void Clear(uint8_t value) = 0;
};

// A stream of work, one or more per context.
class Backend {
 public:
  virtual ~Backend() = default;
  // The nodes in order, views and other no-ops among them. Results must be there on return.
  virtual ggml_status Compute(std::span<ggml_tensor* const> nodes) = 0;
  virtual void SetThreads(int threads) = 0;
};

// The device, with its one buffer type. Methods may be called from several threads.
class Device {
 public:
  virtual ~Device() = default;
  virtual const char* Name() const = 0;  // of registry, device, buffer type and backend
  virtual const char* Description() const = 0;
  virtual void Memory(size_t* free, size_t* total) const = 0;     // bytes
  virtual size_t Alignment() const = 0;                           // bytes, a power of 2
  virtual size_t AllocSize(const ggml_tensor* tensor) const = 0;  // bytes, at least nbytes
  virtual bool SupportsOp(const ggml_tensor* op) const = 0;
  virtual std::unique_ptr<Buffer> NewBuffer(size_t size) = 0;  // size > 0; null: no memory
  virtual std::unique_ptr<Backend> NewBackend() = 0;
};

// What ggml_backend_init is to return: a registry of one device, its buffers not host memory, mmap
// allowed, that works on buffers of its own and on host memory. Its type is ACCEL, in generation
// 2025-07 GPU, as llama.cpp's --device took nothing else. Lives until the end of the process, as
// ggml keeps pointers to it. Once per process: a second call returns the first's, or null if it
// comes from another ggml, whose structs may differ.
ggml_backend_reg* MakeRegistration(const Host& host, std::unique_ptr<Device> device);

// The buffer of ours that holds the tensor (or the tensor it is a view of), else null. Valid only
// after MakeRegistration. Never touches the tensor's data.
Buffer* BufferOf(const ggml_tensor* tensor);
// Whether the tensor's memory is of our type, also where there is none: programs that only measure
// give all tensors empty buffers.
bool IsOfOurType(const ggml_tensor* tensor);

}  // namespace palu::ggml

#endif  // PALU_ADAPTERS_GGML_ABI_H_
