// File: page_plan.h - the byte layout of packed latents: one side (K or V) of one KV head in one
// page.
//
// A page holds T = 32 * blocks tokens. Its codes are
//     codes[block][channel][plane]            block = 32 tokens, channels in basis order
// and its scales, apart from the codes,
//     minmax:  fp16 scale[group][channel], then fp16 zero[group][channel]
//     log8:    u8 scale[group][channel]
//     token minmax:   fp16 scale[run][token], then fp16 zero[run][token]    run = 32 channels
//     token absmax:   fp16 scale[run][token]
//     token factors:  f32 length[token], then f32 inverse[token]
// with T / group_size groups of tokens; none exists for channels of 16 or 32 bits (a side has
// either only such channels or none). Little endian; nothing is aligned beyond 4 bytes;
// docs/page_format.md draws it.
//
// A channel of b bits (1..8) takes exactly 4 b bytes per block: its codes are cut into planes of 8,
// 4, 2 and 1 bits, the binary digits of b from the largest down (b = 3: a 2-bit plane, then a 1-bit
// plane; b = 8: one 8-bit plane). The first plane holds the lowest bits of the code, each next
// plane the bits above. Within a block of 32 tokens, a plane of p bits has 4 p bytes, and token t
// sits in byte t mod (4 p) at bit p * (t / (4 p)). 16-bit channels hold 32 fp16 values, 32-bit
// channels 32 floats.
//
// A code means   value = a * level + z   with a signed 8-bit level:
//     Lloyd-Max levels (log8 at b <= 4):  level = LevelTable(b)[code]
//     uniform levels (all others):        level = code - 2^(b-1)
//     minmax, token minmax:  a = scale,                       z = zero + a / 2
//     log8:                  a = Log8Value(scale) * unit[b],  z = a * half[b]
//     token absmax:          a = scale,                       z = 0
//     token factors:         a = length * inverse,            z = a / 2
// `zero` is the value at the middle code, (min + max) / 2. `length` is |x|, `inverse` 1 / <g, x /
// |x|> for the vector g of the levels + 1/2: then a <g, q> estimates <x, q> without bias (RaBitQ,
// arXiv 2405.12497, section 3.2).
#ifndef PALU_SRC_CODEC_PAGE_PLAN_H_
#define PALU_SRC_CODEC_PAGE_PLAN_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "palu/config.h"

namespace palu {

inline constexpr int kBlockTokens = 32;
inline constexpr int kRunChannels = 32;  // that share a scale of ScaleFormat::kTokenMinMax
// Kernels may read this many bytes past the end of a page; every buffer that holds pages ends with
// them.
inline constexpr size_t kReadPadding = 64;
inline constexpr int kMaxRank = 1024;
// Per-channel float arrays of a plan end with so many zeros, so that vectors may run past the last
// channel.
inline constexpr int kChannelPadding = 16;

// Signed levels of a code of b bits, entries 2^b.. repeat 0; b <= 4. Lloyd-Max levels of a unit
// Gaussian times 1 / Log8Unit(b), rounded to integers.
const std::array<int8_t, 16>& LloydMaxLevels(int bits);
// code - 2^(b-1) for b <= 4, as a table, so that kernels treat both level kinds alike.
const std::array<int8_t, 16>& UniformLevels(int bits);
// value per level unit for rms = 1 (log8): Lloyd-Max at b <= 4, the best uniform step for a
// Gaussian above.
float Log8Unit(int bits);
// 0 for Lloyd-Max levels, 0.5 for the uniform ones (levels lie between codes).
float Log8Half(int bits);

// An 8-bit scale: 5 exponent bits, 3 mantissa bits, value (8 + (e & 7)) / 8 * 2^((e >> 3) - 16);
// 2^-16 .. 61440, about the range of fp16, which bounds K and V.
inline constexpr int kLog8Bias = 16;
float Log8Value(uint8_t e);
// The nearest such scale by ratio, saturating.
uint8_t Log8FromFloat(float x);

// Layout and per-channel constants of one side of one head group. Built once per fit; read by every
// kernel.
struct PagePlan {
  int rank = 0;          // channels; every one has bits > 0
  int page_tokens = 32;  // T, a multiple of 32
  int group_size = 32;   // tokens per scale, divides T
  ScaleFormat scales = ScaleFormat::kMinMax;
  bool raw = false;           // all channels 16 or 32 bits: no scales, value = the stored number
  std::vector<uint8_t> bits;  // [rank]: 1..8, or 16, or 32
  std::vector<uint32_t> code_offset;  // [rank], bytes from the start of a block
  uint32_t block_bytes = 0;           // codes of 32 tokens
  uint32_t scale_bytes = 0;           // scales (and zeros) of one page
  // [rank + kChannelPadding], empty if raw. log8: Log8Unit(b), Log8Half(b); others: 1, 0.5.
  std::vector<float> unit, half;

  int blocks() const { return page_tokens / kBlockTokens; }
  int groups() const { return page_tokens / group_size; }
  // Scales belong to tokens, not to channels.
  bool token_scaled() const {
    return scales == ScaleFormat::kTokenMinMax || scales == ScaleFormat::kTokenAbsMax ||
           scales == ScaleFormat::kTokenFactors;
  }
  // Runs of channels with scales of their own per token.
  int channel_runs() const {
    return scales != ScaleFormat::kTokenFactors ? (rank + kRunChannels - 1) / kRunChannels : 1;
  }
  size_t code_bytes() const { return static_cast<size_t>(block_bytes) * blocks(); }
  // Codes, then scales: a page side is contiguous.
  size_t page_bytes() const { return code_bytes() + scale_bytes; }
  // Bits of codes, and of codes + scales, per channel-token, summed over channels.
  double code_bits_per_token() const { return block_bytes * 8.0 / kBlockTokens; }
  double stored_bits_per_token() const { return page_bytes() * 8.0 / page_tokens; }

  // bits: [rank], each 1..8; or all 16; or all 32. page_tokens: a multiple of 32 and of group_size;
  // 0 = max(32, group_size), or 32 if raw. group_size means nothing to token scales.
  static PagePlan Make(std::vector<uint8_t> bits, ScaleFormat scales, int group_size,
                       int page_tokens = 0);
};

}  // namespace palu

#endif  // PALU_SRC_CODEC_PAGE_PLAN_H_
