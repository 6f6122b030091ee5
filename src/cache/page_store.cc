#include "cache/page_store.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <utility>

#include "palu/errors.h"

namespace palu {

void PageStore::MakeUnique(BufferPtr& slab) {
  if (slab.use_count() == 1) {
    // Pairs with the release of the last other owner's reference.
    std::atomic_thread_fence(std::memory_order_acquire);
    return;
  }
  auto copy = std::make_shared<Buffer>(account_, slab->size());
  std::memcpy(copy->data(), slab->data(), slab->size());
  slab = std::move(copy);
}

// The room of the table depends on its length alone, so that nbytes does not tell how the tokens
// came.
void PageStore::FitTable(size_t n) {
  const size_t room = n == 0 ? 0 : std::bit_ceil(std::max<size_t>(n, 4));
  if (slabs_.capacity() == room) return;
  CountedVector<BufferPtr> table(slabs_.get_allocator());
  table.reserve(room);
  std::move(slabs_.begin(), slabs_.end(), std::back_inserter(table));
  slabs_.swap(table);
}

void PageStore::ShrinkTable() {
  try {
    FitTable(slabs_.size());
  } catch (const MemoryError&) {  // then it stays too large
  }
}

void PageStore::Reserve(int64_t n) {
  if (n == 0) return;
  const size_t needed = static_cast<size_t>((pages_ + n + pages_per_slab_ - 1) / pages_per_slab_);
  const size_t before = slabs_.size();
  // The slab that is half full may be shared: pages behind pages_ belong to whoever writes first.
  if (pages_ % pages_per_slab_ != 0)
    MakeUnique(slabs_[static_cast<size_t>(pages_ / pages_per_slab_)]);
  if (needed > before) FitTable(needed);
  try {
    while (slabs_.size() < needed) slabs_.push_back(std::make_shared<Buffer>(account_, SlabSize()));
  } catch (...) {
    slabs_.resize(before);
    ShrinkTable();
    throw;
  }
}

void PageStore::ReleaseReserve() {
  slabs_.resize(static_cast<size_t>((pages_ + pages_per_slab_ - 1) / pages_per_slab_));
  ShrinkTable();
}

void PageStore::Extend(int64_t n) {
  Reserve(n);
  pages_ += n;
}

uint8_t* PageStore::MutablePage(int64_t i) {
  BufferPtr& slab = slabs_[static_cast<size_t>(i / pages_per_slab_)];
  MakeUnique(slab);
  return slab->data() + (i % pages_per_slab_) * layout_->page_bytes;
}

void PageStore::PopBack(int64_t n) {
  pages_ -= n;
  ReleaseReserve();
}

void PageStore::PopFront(int64_t n) {
  slabs_.erase(slabs_.begin(), slabs_.begin() + n);
  pages_ -= n;
  ShrinkTable();
}

int64_t PageStore::slab_bytes() const {
  int64_t bytes = 0;
  for (const BufferPtr& slab : slabs_) bytes += static_cast<int64_t>(slab->size());
  return bytes;
}

}  // namespace palu
