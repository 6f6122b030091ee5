// File: abi_registration.cc - our objects as structs of the running ggml's generation.
#include <array>
#include <cstring>
#include <exception>
#include <new>
#include <utility>
#include <vector>

#include "abi.h"
#include "abi_layout.h"

namespace palu::ggml {
namespace {

static_assert(sizeof(void*) == 8, "the table of generations is for 64-bit machines");

// What the functions below need; set once, before ggml hears of any of our objects.
struct Registration {
  Host host;
  std::unique_ptr<Device> device;
  void* reg[kRegWords] = {};
  void* dev[kDeviceWords] = {};
  void* buft[kBuftWords] = {};
};
Registration* registration = nullptr;

const Layout& layout() { return *registration->host.layout; }
Device& device() { return *registration->device; }
template <class T>
T* Ours(void* words) {
  return reinterpret_cast<T*>(words);
}

// A function as the word of an iface; F is the type that ggml will call it by.
template <class F>
void* Slot(F* function) {
  return reinterpret_cast<void*>(function);
}

const char* NameOf(void*) noexcept { return device().Name(); }

// ---- buffer

Buffer& Of(ggml_backend_buffer* buffer) {
  return *static_cast<Buffer*>(Word(buffer, layout().buffer_buft + 1));
}
// ggml deletes the struct itself.
void BufferFree(ggml_backend_buffer* buffer) noexcept { delete &Of(buffer); }
void* BufferBase(ggml_backend_buffer* buffer) noexcept { return Of(buffer).Base(); }
ggml_status BufferInit(ggml_backend_buffer* buffer, ggml_tensor* tensor) noexcept {
  return Of(buffer).InitTensor(tensor) ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}
void BufferMemset(ggml_backend_buffer* buffer, ggml_tensor* tensor, uint8_t value, size_t offset,
                  size_t size) noexcept {
  Of(buffer).Memset(tensor, value, offset, size);
}
void BufferSet(ggml_backend_buffer* buffer, ggml_tensor* tensor, const void* data, size_t offset,
               size_t size) noexcept {
  Of(buffer).Set(tensor, data, offset, size);
}
void BufferGet(ggml_backend_buffer* buffer, const ggml_tensor* tensor, void* data, size_t offset,
               size_t size) noexcept {
  Of(buffer).Get(tensor, data, offset, size);
}
bool BufferCopy(ggml_backend_buffer* buffer, const ggml_tensor* src, ggml_tensor* dst) noexcept {
  return Of(buffer).Copy(src, dst);
}
void BufferClear(ggml_backend_buffer* buffer, uint8_t value) noexcept { Of(buffer).Clear(value); }

// ---- buffer type

ggml_backend_buffer* BuftAlloc(ggml_backend_buffer_type* buft, size_t size) noexcept {
  std::unique_ptr<Buffer> buffer;
  try {
    buffer = device().NewBuffer(size);
  } catch (const std::exception&) {  // ggml reports it
  }
  if (!buffer) return nullptr;
  const Layout& at = layout();
  // Exactly the bytes of ggml's struct, which its operator delete may be told. Unused slots are
  // null: among them the optional 2d copies, which ggml then does row by row.
  const size_t words = at.buffer_buft + 4;
  void* memory = ::operator new(words * sizeof(void*), std::nothrow);
  if (memory == nullptr) return nullptr;
  std::memset(memory, 0, words * sizeof(void*));
  Word(memory, 0) = Slot(BufferFree);
  Word(memory, 1) = Slot(BufferBase);
  Word(memory, 2) = Slot(BufferInit);
  Word(memory, 3) = Slot(BufferMemset);
  Word(memory, 4) = Slot(BufferSet);
  Word(memory, 5) = Slot(BufferGet);
  Word(memory, at.buffer_cpy) = Slot(BufferCopy);
  Word(memory, at.buffer_clear) = Slot(BufferClear);
  Word(memory, at.buffer_buft) = buft;
  Word(memory, at.buffer_buft + 1) = buffer.release();
  std::memcpy(&Word(memory, at.buffer_buft + 2), &size, sizeof size);
  return static_cast<ggml_backend_buffer*>(memory);
}
size_t BuftAlignment(ggml_backend_buffer_type*) noexcept { return device().Alignment(); }
size_t BuftAllocSize(ggml_backend_buffer_type*, const ggml_tensor* tensor) noexcept {
  return device().AllocSize(tensor);
}

// ---- backend

Backend& Of(ggml_backend* backend) {
  return *static_cast<Backend*>(Word(backend, layout().backend_device + 1));
}
void BackendFree(ggml_backend* backend) noexcept {
  delete &Of(backend);
  ::operator delete(backend);
}
ggml_status BackendCompute(ggml_backend* backend, ggml_cgraph* graph) noexcept {
  int prefix[2];  // size, n_nodes
  std::memcpy(prefix, graph, sizeof prefix);
  const std::span<ggml_tensor* const> nodes(static_cast<ggml_tensor**>(Word(graph, 2)), prefix[1]);
  const int32_t flag = registration->host.compute_flag;
  const auto wanted = [flag](const ggml_tensor* node) { return (node->flags & flag) == flag; };
  size_t kept = 0;
  for (const ggml_tensor* node : nodes) kept += wanted(node);
  if (kept == nodes.size()) return Of(backend).Compute(nodes);
  std::vector<ggml_tensor*> some;
  some.reserve(kept);
  for (ggml_tensor* node : nodes) {
    if (wanted(node)) some.push_back(node);
  }
  return Of(backend).Compute(some);
}
void BackendSetThreads(ggml_backend* backend, int threads) noexcept {
  Of(backend).SetThreads(threads);
}

// ---- device

const char* DeviceDescription(ggml_backend_device*) noexcept { return device().Description(); }
void DeviceMemory(ggml_backend_device*, size_t* free, size_t* total) noexcept {
  device().Memory(free, total);
}
int DeviceType(ggml_backend_device*) noexcept { return layout().device_type; }

// The struct's own room only: it is the caller's, and of the caller's generation.
void DeviceProps(ggml_backend_device*, void* props) noexcept {
  const auto put = [props](int byte, const auto& value) {
    std::memcpy(static_cast<char*>(props) + byte, &value, sizeof value);
  };
  size_t free = 0, total = 0;
  device().Memory(&free, &total);
  put(0, device().Name());
  put(8, device().Description());
  put(16, free);
  put(24, total);
  put(32, layout().device_type);
  if (layout().caps_byte > 40) put(40, static_cast<const char*>(nullptr));  // device_id
  put(layout().caps_byte, std::array<bool, 4>{});  // nothing async, no host memory, no events
  if (layout().mmap_support) put(layout().caps_byte + 4, true);
}

ggml_backend* DeviceInit(ggml_backend_device* dev, const char*) noexcept {
  static uint8_t guid[16] = {0x70, 0x61, 0x6c, 0x75, 0x9b, 0x1d, 0x4f, 0x52,
                             0xa6, 0x3e, 0x0c, 0x87, 0xd1, 0x45, 0x2b, 0xf8};
  std::unique_ptr<Backend> backend;
  try {
    backend = device().NewBackend();
  } catch (const std::exception&) {  // ggml reports it
  }
  if (!backend) return nullptr;
  const Layout& at = layout();
  const size_t bytes = (at.backend_device + 2) * sizeof(void*);
  void* memory = ::operator new(bytes, std::nothrow);
  if (memory == nullptr) return nullptr;
  std::memset(memory, 0, bytes);
  Word(memory, 0) = guid;
  Word(memory, 1) = Slot(NameOf);
  Word(memory, 2) = Slot(BackendFree);
  Word(memory, at.backend_compute) = Slot(BackendCompute);
  Word(memory, at.backend_device) = dev;
  Word(memory, at.backend_device + 1) = backend.release();
  return static_cast<ggml_backend*>(memory);
}
ggml_backend_buffer_type* DeviceBuft(ggml_backend_device*) noexcept {
  return Ours<ggml_backend_buffer_type>(registration->buft);
}
bool DeviceSupportsOp(ggml_backend_device*, const ggml_tensor* op) noexcept {
  return device().SupportsOp(op);
}
bool DeviceSupportsBuft(ggml_backend_device*, ggml_backend_buffer_type* buft) noexcept {
  return buft == Ours<ggml_backend_buffer_type>(registration->buft) ||
         registration->host.functions.buft_is_host(buft);
}

// ---- registry

size_t RegDeviceCount(ggml_backend_reg*) noexcept { return 1; }
ggml_backend_device* RegDevice(ggml_backend_reg*, size_t) noexcept {
  return Ours<ggml_backend_device>(registration->dev);
}
void* RegProcAddress(ggml_backend_reg*, const char* name) noexcept {
  return std::strcmp(name, "ggml_backend_set_n_threads") == 0 ? Slot(BackendSetThreads) : nullptr;
}

void FillBuft(Registration* all) {
  void** buft = all->buft;
  buft[0] = Slot(NameOf);
  buft[1] = Slot(BuftAlloc);
  buft[2] = Slot(BuftAlignment);
  buft[4] = Slot(BuftAllocSize);
  buft[kBuftDevice] = all->dev;
}

void FillDevice(Registration* all) {
  void** dev = all->dev;
  dev[0] = Slot(NameOf);
  dev[1] = Slot(DeviceDescription);
  dev[2] = Slot(DeviceMemory);
  dev[3] = Slot(DeviceType);
  dev[4] = Slot(DeviceProps);
  dev[5] = Slot(DeviceInit);
  dev[6] = Slot(DeviceBuft);
  dev[9] = Slot(DeviceSupportsOp);
  dev[10] = Slot(DeviceSupportsBuft);
  dev[kDeviceReg] = all->reg;
}

void FillReg(Registration* all) {
  void** reg = all->reg;
  std::memcpy(reg, &all->host.layout->api_version, sizeof(int));
  reg[1] = Slot(NameOf);
  reg[2] = Slot(RegDeviceCount);
  reg[3] = Slot(RegDevice);
  reg[4] = Slot(RegProcAddress);
}

}  // namespace

ggml_backend_reg* MakeRegistration(const Host& host, std::unique_ptr<Device> device) {
  if (registration != nullptr) {
    const bool same = registration->host.functions.op_name == host.functions.op_name;
    return same ? Ours<ggml_backend_reg>(registration->reg) : nullptr;
  }
  auto* all = new Registration{host, std::move(device)};  // never freed: ggml keeps pointers
  FillBuft(all);
  FillDevice(all);
  FillReg(all);
  registration = all;
  return Ours<ggml_backend_reg>(registration->reg);
}

bool IsOfOurType(const ggml_tensor* tensor) {
  if (tensor->view_src != nullptr) tensor = tensor->view_src;
  void* buffer = tensor->buffer;
  return buffer != nullptr && Word(buffer, layout().buffer_buft) == registration->buft;
}

Buffer* BufferOf(const ggml_tensor* tensor) {
  if (!IsOfOurType(tensor)) return nullptr;
  void* buffer = (tensor->view_src != nullptr ? tensor->view_src : tensor)->buffer;
  // ggml makes buffers of our type itself, empty ones and ones that only join others: not ours.
  if (Word(buffer, 0) != Slot(BufferFree)) return nullptr;
  return static_cast<Buffer*>(Word(buffer, layout().buffer_buft + 1));
}

}  // namespace palu::ggml
