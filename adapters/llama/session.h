// File: session.h - one sequence of a model whose KV cache is ours.
//
// llama.cpp computes everything but attention. Its own cache stays at its minimum and is cleared
// after every batch; our caches get the new K and V rows, and our attention overwrites the output
// of its attention node (docs/llama_adapter.md). `llama:TYPE[,fa=off]` instead of a cache config
// leaves llama.cpp's own cache and attention in place, for comparison.
#ifndef PALU_ADAPTERS_LLAMA_SESSION_H_
#define PALU_ADAPTERS_LLAMA_SESSION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "llama/model.h"
#include "palu/cache.h"

namespace palu::llama {

struct SessionOptions {
  std::string cache =
      "palu";  // a KVCacheConfig text, or llama:f16 | llama:q8_0 | llama:q8_0/q4_0 | ... [,fa=off]
  int threads = 0;   // 0 = all cores
  int ubatch = 512;  // tokens per batch, 1..4096
  int64_t context =
      0;  // positions the run will reach; 0 = the training context. Own caches have no limit.
  int64_t kv_memory = 0;  // limit of the KV cache in bytes; 0 = none
  bool fillable = false;  // FillForBenchmark may be called; llama:TYPE needs to know beforehand
  bool self_test = true;  // compare with plain llama.cpp on a few tokens before anything else
};

struct SessionStats {
  int64_t tokens = 0;
  int64_t kv_bytes = 0;       // allocated by the cache
  int64_t kv_fp16_bytes = 0;  // the same tokens in fp16
  double stored_bits_per_element = 0;
  double advertised_bits_per_element = 0;
  std::vector<int> rank_k, rank_v;  // per layer; empty for caches without a basis
  std::vector<CacheStats> layers;   // empty for llama:TYPE
};

// Sees the K and V rows of every batch before they are cached. k, v: [1, H, n, D], keys after RoPE.
using KvObserver = std::function<void(int layer, const ConstTensor& k, const ConstTensor& v,
                                      int64_t position, const RopeParams& rope)>;

// Sees the queries of every batch before they attend. q: [1, Hq, n, Dk] after RoPE, unscaled.
using QueryObserver =
    std::function<void(int layer, const ConstTensor& q, int64_t position, const RopeParams& rope)>;

enum class LogitRows { kNone, kLast, kAll };

// Whether libllama and palu use one OpenMP runtime. If not, sessions compute attention on our cache
// on one thread, as two pools keep each other from running.
bool SharesThreads();

// Threads: one at a time.
class Session {
 public:
  // Errors: ConfigError (cache text, options), FormatError (the self-test differs: this
  // architecture cannot be taken over), MemoryError.
  Session(std::shared_ptr<const Model> model, const SessionOptions& options);
  ~Session();

  // Appends tokens at position() and computes logits. Splits into ubatches; `progress` (may be
  // empty) is called after each with the number of tokens done and returns false to stop early:
  // then Decode returns false and the cache holds what was done. Errors: InputError (no tokens,
  // token out of range, NaN in K or V), MemoryError (nothing appended).
  bool Decode(std::span<const Token> tokens, LogitRows rows = LogitRows::kLast,
              const std::function<bool(int64_t done)>& progress = {});
  // Logits of the last Decode: [row, vocabulary]; kLast has one row. Valid until the next Decode.
  std::span<const float> Logits(int64_t row = 0) const;
  int64_t logit_rows() const;

  int64_t position() const;  // tokens so far
  void Trim(int64_t n);      // drops the last n tokens
  void Clear();              // drops all
  // Brings an empty session to `depth` tokens at the cost of computing `piece` alone: the keys and
  // values of its tokens (1..ubatch) are stored again and again, at positions that go on. They stay
  // rotated for the positions of the piece, so that what is computed afterwards costs what it
  // costs, but means nothing: for speed and memory only. Errors: StateError (not empty, not
  // fillable, more than llama.cpp's cells, or llama.cpp cannot shift the model's positions),
  // InputError, MemoryError; then the session is empty.
  void FillForBenchmark(std::span<const Token> piece, int64_t depth);
  SessionStats Stats() const;
  bool own_cache() const;          // false for llama:TYPE
  std::string cache_text() const;  // resolved
  const Model& model() const;

  // Errors: StateError for llama:TYPE, whose rows are not ours to see.
  void SetObserver(KvObserver observer);
  void SetQueryObserver(QueryObserver observer);
  // The caches, one per layer; empty for llama:TYPE.
  std::span<const KVCache> caches() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace palu::llama

#endif  // PALU_ADAPTERS_LLAMA_SESSION_H_
