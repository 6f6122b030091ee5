// File: region.h - address space that gets memory where it is used.
#ifndef PALU_SRC_BASE_REGION_H_
#define PALU_SRC_BASE_REGION_H_

#include <cstddef>
#include <cstdint>

namespace palu {

// `bytes` of zeroed address space. The system puts memory behind what is written, and takes it back
// from what is released. Movable. It counts nothing: its owner charges what it uses.
class Region {
 public:
  Region() = default;
  // Throws MemoryError when the system has no address space left, or forbids to reserve so much.
  explicit Region(size_t bytes);
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  ~Region();

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  // Gives back the memory of bytes [first, first + n), which read as zeros then; what shares a page
  // of the system with other bytes stays.
  void Release(size_t first, size_t n);

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace palu

#endif  // PALU_SRC_BASE_REGION_H_
