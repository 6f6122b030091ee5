// File: attention_cache.h - layers of one cache, filled and attended to: ours, or llama.cpp's.
#ifndef PALU_APPS_BENCH_ATTENTION_CACHE_H_
#define PALU_APPS_BENCH_ATTENTION_CACHE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/attention_options.h"
#include "bench/synthetic.h"

namespace palu::app {

// Equal layers of one cache. Queries see all layers alike, so that going from layer to layer reads
// as much new memory as a model does. Threads: one at a time.
class AttentionCache {
 public:
  virtual ~AttentionCache() = default;

  // Appends what `tokens` has made, at `position`, to every layer. `last`: it stays unsealed, as
  // the chunk that a model is computing. Errors: those of the cache.
  virtual void Append(const SyntheticTokens& tokens, int64_t position, int n, bool last) = 0;
  // Encodes what the last Append left.
  virtual void Seal() = 0;
  // Queries of the last n tokens, [n, query_heads, head_dim], for runs of `group` layers.
  virtual void Prepare(const std::vector<float>& queries, int n, int group) = 0;
  // Attends in `group` layers: those of run i, i in [0, layers / group).
  virtual void Run(int i) = 0;
  // Bytes of one layer.
  virtual int64_t layer_bytes() const = 0;
  // SIMD target of the kernels, or whose they are.
  virtual std::string kernel() const = 0;
  // What the one who reads the figures should know; "" = nothing.
  virtual std::string remark() const { return ""; }
};

struct AttentionBytes {
  int64_t layer = 0;    // stored, of one layer
  int64_t scratch = 0;  // besides, while it runs
};

// Before there is a cache. Errors: ConfigError (cache text, or one that the shape does not fit).
AttentionBytes EstimateAttentionBytes(const std::string& cache, const AttentionShape& shape,
                                      int64_t tokens, int queries);

std::unique_ptr<AttentionCache> MakeAttentionCache(const std::string& cache,
                                                   const AttentionShape& shape, int64_t tokens,
                                                   int layers, int threads);

}  // namespace palu::app

#endif  // PALU_APPS_BENCH_ATTENTION_CACHE_H_
