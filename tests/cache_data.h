// File: cache_data.h - keys and values of three heads, for tests of what a cache keeps.
#ifndef PALU_TESTS_CACHE_DATA_H_
#define PALU_TESTS_CACHE_DATA_H_

#include "test_util.h"

namespace palu::test {

inline constexpr int kHeads = 3, kDim = 64;
inline constexpr char kQuick[] = "palu:fit_tokens=96,recent_tokens=20";

inline Dims Of(int64_t tokens, int64_t batch = 1) { return {batch, kHeads, tokens, kDim}; }

struct Data {
  Dims dims;
  RopeParams rope;
  Floats k, v;
};

inline Data MakeData(int64_t tokens, uint64_t seed, int64_t batch = 1) {
  const Dims dims = Of(tokens, batch);
  const RopeParams rope = Rope(kDim);
  return {dims, rope, RopedKeys(dims, rope, seed),
          Planted(dims, Decay(kDim, 1, 0.93), 0, seed + 1)};
}

inline void Feed(KVCache& cache, const Data& d, int64_t first, int64_t n) {
  Feed(cache, d.k, d.dims, d.v, d.dims, first, n, &d.rope);
}

}  // namespace palu::test

#endif  // PALU_TESTS_CACHE_DATA_H_
