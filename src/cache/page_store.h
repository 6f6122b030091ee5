// File: page_store.h - a growing row of equal pages, in slabs that forks share.
#ifndef PALU_SRC_CACHE_PAGE_STORE_H_
#define PALU_SRC_CACHE_PAGE_STORE_H_

#include <cstdint>

#include "base/memory.h"
#include "codec/page_layout.h"

namespace palu {

// Pages that hold so many tokens.
inline int64_t PagesFor(int64_t tokens, int page_tokens) {
  return (tokens + page_tokens - 1) / page_tokens;
}

// Pages [0, pages()) of one layout. Grows by whole slabs, never by copying; a slab that a copy of
// the store also holds is cloned before it is written. Copies share slabs. Threads: const calls are
// safe at once; so are copies used from different threads.
class PageStore {
 public:
  // `layout` must outlive the store.
  PageStore(const PageLayout* layout, int pages_per_slab, const MemoryAccountPtr& account)
      : layout_(layout),
        pages_per_slab_(pages_per_slab),
        account_(account),
        slabs_(CountingAllocator<BufferPtr>(account)) {}

  const PageLayout& layout() const { return *layout_; }
  int64_t pages() const { return pages_; }
  int pages_per_slab() const { return pages_per_slab_; }
  const uint8_t* page(int64_t i) const {
    return slabs_[i / pages_per_slab_]->data() + (i % pages_per_slab_) * layout_->page_bytes;
  }

  // Allocates for pages [pages(), pages() + n), so that Extend(n) cannot fail. Throws MemoryError;
  // then nothing changed.
  void Reserve(int64_t n);
  // Gives back what Reserve allocated and Extend did not use.
  void ReleaseReserve();
  // Makes pages [pages(), pages() + n) exist, zeroed or with old content, and writable. Throws as
  // Reserve.
  void Extend(int64_t n);
  // Page i for writing; its slab is cloned first if it is shared. Throws MemoryError.
  uint8_t* MutablePage(int64_t i);
  void PopBack(int64_t n);
  // Needs pages_per_slab() == 1.
  void PopFront(int64_t n);

  int64_t slab_bytes() const;  // all slabs held, shared ones too
  int64_t table_bytes() const {
    return static_cast<int64_t>(slabs_.capacity() * sizeof(BufferPtr));
  }

 private:
  size_t SlabSize() const { return layout_->page_bytes * pages_per_slab_ + kReadPadding; }
  void MakeUnique(BufferPtr& slab);
  void FitTable(size_t n);
  void ShrinkTable();

  const PageLayout* layout_;
  int pages_per_slab_;
  MemoryAccountPtr account_;
  CountedVector<BufferPtr> slabs_;
  int64_t pages_ = 0;
};

}  // namespace palu

#endif  // PALU_SRC_CACHE_PAGE_STORE_H_
