// File: synthetic.h - made-up keys, values and queries with the look of a model's: neighbours in
// time are alike, few channels hold most of the energy, keys and queries are rotated by RoPE.
#ifndef PALU_APPS_BENCH_SYNTHETIC_H_
#define PALU_APPS_BENCH_SYNTHETIC_H_

#include <cstdint>
#include <span>
#include <vector>

#include "palu/rope.h"

namespace palu::app {

// A stretch of tokens is made once and repeats; only the rotation goes on, so that long contexts
// cost little to fill. The same numbers on every machine and for every number of threads.
class SyntheticTokens {
 public:
  // head_dim even.
  SyntheticTokens(int query_heads, int kv_heads, int head_dim);

  const RopeParams& rope() const { return rope_; }
  // Tokens [position, position + n): [kv_heads, n, head_dim] each, valid until the next call.
  void Make(int64_t position, int n);
  std::span<const float> keys() const { return keys_; }
  std::span<const float> values() const { return values_; }
  // Queries of the same tokens: [n, query_heads, head_dim]. Scaled by 1 / sqrt(head_dim) their
  // scores have a standard deviation of about 2: neither flat nor one token alone.
  std::vector<float> Queries(int64_t position, int n) const;

 private:
  void Rotate(int64_t position, float* row) const;

  int query_heads_, kv_heads_, head_dim_;
  RopeParams rope_;
  std::vector<float> key_block_, value_block_;  // [kv_heads, kBlock, head_dim], keys un-rotated
  std::vector<float> keys_, values_;
};

}  // namespace palu::app

#endif  // PALU_APPS_BENCH_SYNTHETIC_H_
