// File: size.h - the size of a cache as an evaluation reports it.
#ifndef PALU_APPS_EVAL_SIZE_H_
#define PALU_APPS_EVAL_SIZE_H_

#include <cstdint>
#include <span>

#include "llama/session.h"

namespace palu::app {

struct CacheSize {
  double code_bits = 0;           // codes and scales, per element of encoded tokens
  double stored_bits = 0;         // every byte of the sequence, per element
  double stored_bits_at_32k = 0;  // the same, when the sequence has grown to 32,768 tokens
  int64_t exact_tokens = 0;       // of a layer with full attention
  int64_t kv_bytes = 0;
};

inline constexpr int64_t kLongContext = 32768;

// Bits per element when all layers have grown to `tokens` tokens: the bytes of now, and what the
// format of encoded tokens (of exact ones, where nothing is encoded) takes for each token more.
// Layers with a sliding window hold and count at most its tokens. shapes, stats: one per layer.
double StoredBitsAt(int64_t tokens, std::span<const LayerShape> shapes,
                    std::span<const CacheStats> stats);

// Of a session with at least one token. A cache of llama.cpp holds all its cells from the start, at
// the same bits per element whatever the length.
CacheSize SizeOf(const llama::Session& session);

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_SIZE_H_
