// File: abi_test_plugin.cc - a small backend made by adapters/ggml/abi.h, as a library that any
// ggml loads. It keeps plain memory and writes down every call; abi_test.cc reads what it wrote.
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "ggml/abi.h"

#define PALU_TEST_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

namespace ggml = palu::ggml;

std::mutex mutex;
std::string calls, taken, error, generation;
ggml::Host host;

void Note(const std::string& call) {
  const std::lock_guard lock(mutex);
  calls += call + "\n";
}
std::string Number(size_t value) { return " " + std::to_string(value); }

class TestBuffer : public ggml::Buffer {
 public:
  explicit TestBuffer(size_t size)
      : size_(size), memory_(static_cast<char*>(std::aligned_alloc(64, (size + 127) / 64 * 64))) {}
  ~TestBuffer() override {
    std::free(memory_);
    Note("buffer free");
  }
  void* Base() override { return memory_; }
  bool InitTensor(ggml_tensor* tensor) override {
    Note(std::string("init ") + tensor->name);
    return true;
  }
  void Memset(ggml_tensor* tensor, uint8_t value, size_t offset, size_t size) override {
    Note(std::string("memset ") + tensor->name + Number(value) + Number(offset) + Number(size));
    std::memset(static_cast<char*>(tensor->data) + offset, value, size);
  }
  void Set(ggml_tensor* tensor, const void* data, size_t offset, size_t size) override {
    Note(std::string("set ") + tensor->name + Number(offset) + Number(size));
    std::memcpy(static_cast<char*>(tensor->data) + offset, data, size);
  }
  void Get(const ggml_tensor* tensor, void* data, size_t offset, size_t size) override {
    Note(std::string("get ") + tensor->name + Number(offset) + Number(size));
    std::memcpy(data, static_cast<const char*>(tensor->data) + offset, size);
  }
  bool Copy(const ggml_tensor* src, ggml_tensor* dst) override {
    const bool ours = ggml::BufferOf(src) != nullptr;
    Note(std::string("copy ") + src->name + " " + dst->name + (ours ? "" : " foreign"));
    if (ours) std::memcpy(dst->data, src->data, host.functions.nbytes(src));
    return ours;
  }
  void Clear(uint8_t value) override {
    Note("clear" + Number(value));
    std::memset(memory_, value, size_);
  }

 private:
  size_t size_;
  char* memory_;
};

// Rows of float32 to the places that the indices name.
void SetRows(ggml_tensor* node) {
  const ggml_tensor* rows = node->src[0];
  const ggml_tensor* places = node->src[1];
  for (int64_t i = 0; i < rows->ne[1]; ++i) {
    const int64_t place = static_cast<const int64_t*>(places->data)[i];
    std::memcpy(static_cast<char*>(node->data) + place * node->nb[1],
                static_cast<const char*>(rows->data) + i * rows->nb[1],
                rows->ne[0] * sizeof(float));
  }
}

// No attention: scale times the sum of the keys, enough to see that the arguments arrive.
void SumKeys(ggml_tensor* node) {
  const ggml_tensor* keys = node->src[1];
  float scale = 0;
  std::memcpy(&scale, node->op_params, sizeof scale);
  auto* out = static_cast<float*>(node->data);
  for (int64_t i = 0; i < node->ne[0]; ++i) {
    out[i] = 0;
    for (int64_t c = 0; c < keys->ne[1]; ++c) {
      out[i] += scale * reinterpret_cast<const float*>(static_cast<const char*>(keys->data) +
                                                       c * keys->nb[1])[i];
    }
  }
}

class TestBackend : public ggml::Backend {
 public:
  ~TestBackend() override { Note("backend free"); }
  ggml_status Compute(std::span<ggml_tensor* const> nodes) override {
    for (ggml_tensor* node : nodes) {
      const int op = static_cast<int>(node->op);
      if (op == host.ops.set_rows) {
        Note(std::string("set_rows ") + node->name);
        SetRows(node);
      } else if (op == host.ops.flash_attn_ext) {
        Note(std::string("flash_attn_ext ") + node->name);
        SumKeys(node);
      }
    }
    return GGML_STATUS_SUCCESS;
  }
  void SetThreads(int threads) override { Note("threads" + Number(threads)); }
};

class TestDevice : public ggml::Device {
 public:
  const char* Name() const override { return "PALUTEST"; }
  const char* Description() const override { return "every call written down"; }
  void Memory(size_t* free, size_t* total) const override {
    *free = size_t{1} << 30, *total = size_t{1} << 31;
  }
  size_t Alignment() const override { return 64; }
  size_t AllocSize(const ggml_tensor* tensor) const override {
    return host.functions.nbytes(tensor);
  }
  bool SupportsOp(const ggml_tensor* op) const override {
    const int number = static_cast<int>(op->op);
    if (number == host.ops.set_rows) return ggml::BufferOf(op) != nullptr;
    if (number == host.ops.flash_attn_ext) return ggml::BufferOf(op->src[1]) != nullptr;
    return number == host.ops.none || number == host.ops.view || number == host.ops.permute;
  }
  std::unique_ptr<ggml::Buffer> NewBuffer(size_t size) override {
    if (size == kRefused) throw std::bad_alloc();
    Note("alloc" + Number(size));
    return std::make_unique<TestBuffer>(size);
  }
  std::unique_ptr<ggml::Backend> NewBackend() override { return std::make_unique<TestBackend>(); }

 private:
  static constexpr size_t kRefused = 4097;
};

}  // namespace

// The calls since the last time, one a line.
PALU_TEST_EXPORT const char* palu_test_calls() {
  const std::lock_guard lock(mutex);
  taken = std::exchange(calls, {});
  return taken.c_str();
}
PALU_TEST_EXPORT const char* palu_test_error() { return error.c_str(); }
PALU_TEST_EXPORT const char* palu_test_generation() { return generation.c_str(); }
PALU_TEST_EXPORT int palu_test_compute_flag() { return host.compute_flag; }

PALU_TEST_EXPORT ggml_backend_reg* ggml_backend_init() {
  auto probed = ggml::ProbeHost({.caller = __builtin_return_address(0), .lookup = nullptr});
  if (auto* refused = std::get_if<std::string>(&probed)) {
    error = *refused;
    return nullptr;
  }
  host = std::get<ggml::Host>(probed);
  generation = ggml::GenerationName(host);
  return ggml::MakeRegistration(host, std::make_unique<TestDevice>());
}
