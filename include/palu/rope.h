// File: rope.h - how a model rotates its keys, so that the fit can undo it.
//
// The cache stores keys as they come, that is after RoPE. A basis fitted on rotated keys of the
// prompt fails for later positions: the slow planes have shown only a sliver of their orbit. With
// RopeParams the fit un-rotates its sample and averages the second moments over every position the
// context can reach.
#ifndef PALU_ROPE_H_
#define PALU_ROPE_H_

#include <vector>

namespace palu {

enum class RopePairing {
  kInterleaved,  // plane i = dims (2i, 2i+1); ggml "NORM", the llama family's GGUF files
  kHalves,  // plane i = dims (i, i + n/2), n = 2 * inv_freq.size(); ggml "NEOX", qwen, gemma, phi
};

// At position p, plane i of a key is turned by the angle p * inv_freq[i]. Dims at and beyond
// 2 * inv_freq.size() are not rotated. Scaling (linear, YaRN, LongRoPE, Llama 3) is already applied
// to inv_freq; a magnitude factor that is the same for every plane needs no mention.
struct RopeParams {
  RopePairing pairing = RopePairing::kHalves;
  std::vector<float> inv_freq;  // radians per position, [n_rot / 2]; empty = no rotation

  bool operator==(const RopeParams&) const = default;
};

}  // namespace palu

#endif  // PALU_ROPE_H_
