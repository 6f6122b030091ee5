#include "base/region.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/memory.h"
#include "palu/errors.h"

namespace palu {

Region::Region(size_t bytes) : bytes_(bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    throw MemoryError("out of address space: no " + FormatBytes(static_cast<int64_t>(bytes)) +
                      " for the cache");
  }
  data_ = static_cast<uint8_t*>(data);
#ifdef MADV_NOHUGEPAGE
  // A huge page would be 2 MiB of memory for the first byte, where a slab is a tenth of that.
  madvise(data, bytes, MADV_NOHUGEPAGE);
#endif
}

Region::Region(Region&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Region& Region::operator=(Region&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Region::~Region() {
  if (data_) munmap(data_, bytes_);
}

void Region::Release(size_t first, size_t n) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t begin = (first + page - 1) / page * page;
  const size_t end = std::min(first + n, bytes_) / page * page;
  if (begin < end) madvise(data_ + begin, end - begin, MADV_DONTNEED);
}

}  // namespace palu
