#include "base/memory.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "palu/errors.h"

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

void MemoryAccount::Add(int64_t bytes) {
  const int64_t now = allocated_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  if (limit_ > 0 && now > limit_) {
    allocated_.fetch_sub(bytes, std::memory_order_relaxed);
    throw MemoryError("the cache would need " + FormatBytes(now) + ", its limit is " +
                      FormatBytes(limit_));
  }
  int64_t peak = peak_.load(std::memory_order_relaxed);
  while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}

Buffer::Buffer(const MemoryAccountPtr& account, size_t bytes)
    : charge_(account, static_cast<int64_t>((bytes + 63) / 64 * 64)),
      size_((bytes + 63) / 64 * 64) {
  data_ = static_cast<uint8_t*>(std::aligned_alloc(64, size_ ? size_ : 64));
  if (!data_)
    throw MemoryError("out of memory: no " + FormatBytes(static_cast<int64_t>(bytes)) +
                      " for the cache");
  std::memset(data_, 0, size_);
}

Buffer::~Buffer() { std::free(data_); }

}  // namespace palu
