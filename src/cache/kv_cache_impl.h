// File: kv_cache_impl.h - what KVCache points to. Copying it forks: sequences share pages.
#ifndef PALU_SRC_CACHE_KV_CACHE_IMPL_H_
#define PALU_SRC_CACHE_KV_CACHE_IMPL_H_

#include <memory>
#include <vector>

#include "cache/sequence.h"

namespace palu {

class KVCacheImpl {
 public:
  KVCacheConfig given;  // as the caller asked
  std::shared_ptr<const LayerContext> context;
  std::vector<Sequence> sequences;  // [B]

  int64_t shared_basis_bytes() const {
    return context->calibration ? context->calibration->nbytes() : 0;
  }
};

}  // namespace palu

#endif  // PALU_SRC_CACHE_KV_CACHE_IMPL_H_
