#include "base/memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "palu/errors.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace palu {

std::string FormatBytes(int64_t bytes) {
  char text[48];
  if (bytes < 1024) {
    std::snprintf(text, sizeof(text), "%lld B", static_cast<long long>(bytes));
  } else if (bytes < (1 << 20)) {
    std::snprintf(text, sizeof(text), "%.1f KiB", bytes / 1024.0);
  } else if (bytes < (1ll << 30)) {
    std::snprintf(text, sizeof(text), "%.1f MiB", bytes / 1048576.0);
  } else {
    std::snprintf(text, sizeof(text), "%.2f GiB", bytes / 1073741824.0);
  }
  return text;
}

namespace {

void RaiseTo(int64_t value, std::atomic<int64_t>& peak) {
  int64_t known = peak.load(std::memory_order_relaxed);
  while (value > known && !peak.compare_exchange_weak(known, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

void MemoryAccount::Add(int64_t bytes) {
  const int64_t now = allocated_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  if (limit_ > 0 && now > limit_) {
    allocated_.fetch_sub(bytes, std::memory_order_relaxed);
    throw MemoryError("the cache would need " + FormatBytes(now) + ", its limit max_bytes is " +
                      FormatBytes(limit_));
  }
  RaiseTo(now, peak_);
}

void MemoryAccount::AddToHeap(int64_t bytes) {
  RaiseTo(heap_.fetch_add(bytes, std::memory_order_relaxed) + bytes, heap_peak_);
}

void MemoryAccount::ReturnFreedMemory() {
  constexpr int64_t kAtLeast = 1 << 20, kPart = 128;
  const int64_t now = heap_.load(std::memory_order_relaxed);
  const int64_t freed = heap_peak_.load(std::memory_order_relaxed) - now;
  if (freed < std::max(kAtLeast, allocated() / kPart)) return;
  heap_peak_.store(now, std::memory_order_relaxed);
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

namespace {

constexpr size_t kAlignment = 64;  // a cache line, and the widest vectors

size_t RoundUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

// By calloc: memory that is fresh from the system is zero, and is touched where it is used, by many
// threads. Aligned by hand: glibc before 2.38 does not take a freed aligned block for a new one of
// the same size, so that pages which come and go would grow the heap without end.
Buffer::Buffer(const MemoryAccountPtr& account, size_t bytes)
    : charge_(account, static_cast<int64_t>(RoundUp(bytes))),
      block_(std::calloc(1, RoundUp(bytes) + kAlignment)),
      size_(RoundUp(bytes)) {
  if (!block_)
    throw MemoryError("out of memory: no " + FormatBytes(static_cast<int64_t>(bytes)) +
                      " for the cache");
  const auto address = reinterpret_cast<uintptr_t>(block_);
  data_ = static_cast<uint8_t*>(block_) + (kAlignment - address % kAlignment) % kAlignment;
  if (account) account->AddToHeap(charge_.bytes());
}

Buffer::~Buffer() {
  std::free(block_);
  if (charge_.account()) charge_.account()->RemoveFromHeap(charge_.bytes());
}

}  // namespace palu
