// File: cache.h - the KV cache of one layer.
//
//   palu::KVCache& cache = caches[layer];
//   cache.Append(k, v, {.rope = &rope});              // [B, Hkv, n, D], keys after RoPE
//   cache.Attend({.q = q, .scale = 1 / sqrt(D)}, out);  // queries of the last n tokens; [B, Hq, n,
//   D] cache.Seal();                                     // encode what has left the exact window
//
// Tokens live in an exact window (the first `sink_tokens` and at least the last `recent_tokens`)
// and in packed pages of latents; those of a layer with a sliding window in 8-bit pages, or exact
// (`windowed_bits`), until no query can see them. Attend reads both as they are; neither K nor V is
// rebuilt. Source of the method: PALU, arXiv 2407.21118, as adapted by VeloxQuant-MLX
// (docs/method.md).
#ifndef PALU_CACHE_H_
#define PALU_CACHE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "palu/config.h"
#include "palu/rope.h"
#include "palu/tensor.h"

namespace palu {

// What one layer of a model looks like to its cache.
struct LayerShape {
  int index = 0;       // for messages
  int kv_heads = 0;    // H, >= 1
  int head_dim_k = 0;  // D of keys, 1..1024
  int head_dim_v = 0;  // D of values
  int window = 0;      // sliding window in tokens; 0 = full attention
};

struct AppendArgs {
  int64_t position =
      -1;  // of the first token; -1 = right after the last one. A gap is a StateError.
  const RopeParams* rope =
      nullptr;  // how the keys were rotated; null = unknown (key_fit=averaged then needs none
                // only for methods without a basis, otherwise the fit is a StateError)
};

struct AttendArgs {
  ConstTensor
      q;  // [B, Hq, n, D]; Hq a multiple of kv_heads, query head h reads KV head h / (Hq / H)
  float scale = 0;     // multiplies q.k; 0 = 1 / sqrt(head_dim_k)
  float soft_cap = 0;  // s -> cap * tanh(s / cap); 0 = none
  const float* sinks =
      nullptr;  // [Hq] logits that join the denominator without a value (attention sinks)
  const float* mask = nullptr;  // [n, size()] added to the scaled logits, -inf hides; null = causal
                                // (and the layer's window) only
  int64_t mask_stride = 0;      // floats from one query's row to the next; 0 = size()
  bool causal = true;           // query i is the (size() - n + i)-th token and sees no later one
};

struct CacheStats {
  int64_t tokens = 0;          // per sequence
  int64_t encoded_tokens = 0;  // of them in packed pages
  int64_t exact_tokens = 0;    // of them in the exact window
  int rank_k = 0,
      rank_v = 0;  // 0 = not fitted (or no basis); with rank_policy=per_group the largest
  int epochs = 0;  // fits that packed tokens belong to; more than 1 only in a CellCache
  double assigned_avg_bits =
      0;  // max over K and V of the code bits per element, without scales ("advertised")
  double code_bits = 0;  // mean over K and V of code + scale bits per element of encoded tokens
  // Bytes really allocated, by purpose; nbytes is their sum and equals the allocator's count.
  int64_t nbytes = 0;
  int64_t code_bytes = 0, scale_bytes = 0, basis_bytes = 0, window_bytes = 0, slack_bytes = 0,
          table_bytes = 0;
  // The same tokens as fp16 K and V: B * S * H * (Dk + Dv) * 2, S at most the layer's window.
  int64_t fp16_bytes = 0;
  double stored_bits_per_element = 0;  // nbytes * 16 / fp16_bytes
  double residual_energy_k = 0,
         residual_energy_v = 0;  // share of the encoded tokens' energy outside the subspace
                                 // (drift); 0 with key_metric=queries
};

class KVCacheImpl;

// One layer, B sequences. Movable, not copyable (Fork copies on purpose).
// Threads: calls on one cache must not overlap; different caches are independent. Attend, Append
// and Seal use up to `threads` OpenMP threads inside; results do not depend on their number.
class KVCache {
 public:
  KVCache(KVCache&&) noexcept;
  KVCache& operator=(KVCache&&) noexcept;
  ~KVCache();

  // Adds n tokens to every sequence. k: [B, H, n, Dk], v: [B, H, n, Dv]; f32, f16 or bf16. The
  // tokens stay exact until Seal, or until the next Append, so that the queries of a chunk see the
  // chunk exactly. Errors: InputError (shape, NaN, Inf, beyond fp16: layer, head and token are
  // named), StateError, MemoryError (what the append before had left to Seal may be sealed then,
  // and what a sliding window no longer shows be dropped). Cost: one copy to fp16; no allocation in
  // steady state but a page slab every 256 tokens.
  void Append(const ConstTensor& k, const ConstTensor& v, const AppendArgs& args = {});

  // out[b, h, i] = sum_t softmax_t(scale * q.k_t) v_t, straight from pages and window. out: [B, Hq,
  // n, Dv]. Errors: InputError, StateError (empty cache). Cost: rank multiply-adds per token, head
  // and side.
  void Attend(const AttendArgs& args, const MutableTensor& out) const;

  // Fits the basis once enough tokens are there, and encodes the tokens that have left the exact
  // window. The bytes stored after Seal depend on the tokens alone, not on how they were chunked or
  // on the number of threads. Errors: MemoryError.
  void Seal();

  // The whole K and V in the caller's dtype, decoded: [B, H, S, D]. For checks and for hosts that
  // want them.
  struct KV {
    OwnedTensor k, v;
  };
  KV Reconstruct(DType dtype = DType::kF32) const;
  // Append, Seal, Reconstruct in the dtype of k: the reference's update_and_fetch.
  KV UpdateAndFetch(const ConstTensor& k, const ConstTensor& v, const AppendArgs& args = {});

  // Drops the last n tokens; the basis stays. A page that is cut is decoded back into the window
  // and encoded anew when it is full again. n > size(), or tokens that a sliding-window layer no
  // longer has: StateError.
  void Trim(int64_t n);
  // Drops all tokens and the basis.
  void Clear();
  // A second cache with the same content. Pages are shared (counted references) until one side
  // changes them.
  KVCache Fork() const;

  int64_t size() const;  // tokens per sequence, S
  const LayerShape& shape() const;
  const KVCacheConfig& config() const;
  CacheStats Stats() const;
  int64_t nbytes() const;  // Stats().nbytes, cheap

 private:
  friend class KVCacheBuilder;
  explicit KVCache(std::unique_ptr<KVCacheImpl> impl);
  std::unique_ptr<KVCacheImpl> impl_;
};

}  // namespace palu

#endif  // PALU_CACHE_H_
