// File: memory.h - every long-lived byte of a cache is counted here, so reported bytes are
// allocated bytes.
#ifndef PALU_SRC_BASE_MEMORY_H_
#define PALU_SRC_BASE_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace palu {

// The count of one model's caches (all layers, all forks). Threads: safe.
class MemoryAccount {
 public:
  explicit MemoryAccount(int64_t limit_bytes) : limit_(limit_bytes) {}

  // Throws MemoryError when the limit would be passed; then nothing is counted.
  void Add(int64_t bytes);
  void Remove(int64_t bytes) { allocated_.fetch_sub(bytes, std::memory_order_relaxed); }

  // Of Buffers, which lie in the heap.
  void AddToHeap(int64_t bytes);
  void RemoveFromHeap(int64_t bytes) { heap_.fetch_sub(bytes, std::memory_order_relaxed); }
  // Gives freed heap memory back to the system, if that is a noticeable part of all. The allocator
  // would keep it: blocks that a prompt needed and packing freed lie between others. Giving back
  // costs a third of a millisecond, and what is given back costs more when it is needed again.
  void ReturnFreedMemory();

  int64_t allocated() const { return allocated_.load(std::memory_order_relaxed); }
  int64_t peak() const { return peak_.load(std::memory_order_relaxed); }
  int64_t limit() const { return limit_; }

 private:
  std::atomic<int64_t> allocated_{0}, peak_{0};
  std::atomic<int64_t> heap_{0}, heap_peak_{0};  // the second since memory was given back
  const int64_t limit_;                          // 0 = none
};

using MemoryAccountPtr = std::shared_ptr<MemoryAccount>;

// Counts `bytes` for as long as it lives.
class MemoryCharge {
 public:
  MemoryCharge() = default;
  MemoryCharge(MemoryAccountPtr account, int64_t bytes)
      : account_(std::move(account)), bytes_(bytes) {
    if (account_) account_->Add(bytes_);
  }
  MemoryCharge(MemoryCharge&& other) noexcept
      : account_(std::move(other.account_)), bytes_(std::exchange(other.bytes_, 0)) {}
  MemoryCharge& operator=(MemoryCharge&& other) noexcept {
    std::swap(account_, other.account_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~MemoryCharge() {
    if (account_) account_->Remove(bytes_);
  }
  int64_t bytes() const { return bytes_; }
  const MemoryAccountPtr& account() const { return account_; }

 private:
  MemoryAccountPtr account_;
  int64_t bytes_ = 0;
};

// A zeroed, counted block, 64-byte aligned.
class Buffer {
 public:
  // Throws MemoryError (limit, or no memory).
  Buffer(const MemoryAccountPtr& account, size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  MemoryCharge charge_;
  void* block_;    // of calloc
  uint8_t* data_;  // the aligned part
  size_t size_;
};

using BufferPtr = std::shared_ptr<Buffer>;

// std::vector storage that is counted.
template <class T>
struct CountingAllocator {
  using value_type = T;
  MemoryAccountPtr account;

  explicit CountingAllocator(MemoryAccountPtr a) : account(std::move(a)) {}
  template <class U>
  CountingAllocator(const CountingAllocator<U>& other)
      : account(other.account) {}  // NOLINT: rebind

  T* allocate(size_t n) {
    account->Add(static_cast<int64_t>(n * sizeof(T)));
    try {
      return std::allocator<T>().allocate(n);
    } catch (...) {
      account->Remove(static_cast<int64_t>(n * sizeof(T)));
      throw;
    }
  }
  void deallocate(T* p, size_t n) {
    std::allocator<T>().deallocate(p, n);
    account->Remove(static_cast<int64_t>(n * sizeof(T)));
  }
  template <class U>
  bool operator==(const CountingAllocator<U>& other) const {
    return account == other.account;
  }
};

template <class T>
using CountedVector = std::vector<T, CountingAllocator<T>>;

// "1.5 MiB" and the like, for messages.
std::string FormatBytes(int64_t bytes);

}  // namespace palu

#endif  // PALU_SRC_BASE_MEMORY_H_
