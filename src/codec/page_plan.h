// File: page_plan.h - the byte layout of packed latents: one side (K or V) of one KV head in one
// page.
//
// A page holds T = 32 * blocks tokens. Its codes are
//     codes[block][quad][plane]            block = 32 tokens, quad = 4 channels of equal bits
// and its scales, apart from the codes,
//     minmax:  fp16 scale[group][slot], then fp16 zero[group][slot]
//     log8:    u8 scale[group][slot]
//     token minmax:   fp16 scale[run][token], then fp16 zero[run][token]    run = 32 channels
//     token absmax:   fp16 scale[run][token]
//     token factors:  f32 length[token], then f32 inverse[token]
// with T / group_size groups of tokens. Little endian; nothing is aligned beyond 4 bytes;
// docs/page_format.md draws it.
//
// Channels are sorted by bits, most first (stable), and cut into quads; where the channels of some
// bits do not fill their last quad, its slots stay empty: code 0, scale 0. Slot 4 q + l is lane l
// of quad q. Within a block a quad of b bits takes exactly 16 b bytes: its 128 codes are put in
// order,
//     for scores (K):  code 4 t + l                      a 32-bit lane is one token
//     for sums (V):    code 16 (t / 4) + 4 l + t mod 4   a 32-bit lane is 4 tokens of a channel
// so that a product of four bytes at a time sums over channels, and over tokens. Then they are cut
// into planes of 8, 4, 2 and 1 bits, the binary digits of b from the largest down (b = 3: a 2-bit
// plane, then a 1-bit plane). The first plane holds the lowest bits of the code, each next plane
// the bits above. A plane of p bits has 16 p bytes; code j sits in byte j mod 16 p at bit p * (j /
// 16 p).
//
// Raw sides (all channels 16 or all 32 bits: exact tokens) have no quads and no scales:
// codes[block] [channel] are 32 fp16 values or floats, tokens in order.
//
// A code means   value = a * (level - mid) + z   with a level of 0..255:
//     Lloyd-Max levels (log8 at b <= 4):  level = LevelTable(b)[code], mid = half the largest
//     uniform levels (all others):        level = code, mid = 2^(b-1)
//     minmax, token minmax:  a = scale,                       z = zero + a / 2
//     log8:                  a = Log8Value(scale) * unit[b],  z = a * half[b]
//     token absmax:          a = scale,                       z = 0
//     token factors:         a = length * inverse,            z = a / 2
// `zero` is the value at the middle code, (min + max) / 2. `length` is |x|, `inverse` 1 / <g, x /
// |x|> for the vector g of the levels less mid + 1/2: then a <g, q> estimates <x, q> without bias
// (RaBitQ, arXiv 2405.12497, section 3.2).
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
// Float arrays of a plan end with so many zeros, so that vectors may run past the last slot.
inline constexpr int kChannelPadding = 16;

inline constexpr int kQuad = 4;                          // channels that are packed together
inline constexpr int kQuadCodes = kQuad * kBlockTokens;  // of one block

// Levels less mid of a code of 1..4 bits, entries 2^b.. repeat 0: those of the Lloyd-Max quantiser
// of a unit Gaussian (J. Max, "Quantizing for minimum distortion", 1960), as integers times 1 /
// Log8Unit(b). Of all integer roundings with the largest level in 40..127, these have the least
// distortion: .36338, .11748, .03455 and .00951 at 1..4 bits, which is the exact quantiser's to
// 0.06 %.
inline constexpr std::array<int8_t, 16> kLloydMaxLevels[5] = {
    {},
    {-64, 64},
    {-40, -12, 12, 40},
    {-88, -55, -31, -10, 10, 31, 55, 88},
    {-104, -79, -62, -48, -36, -25, -15, -5, 5, 15, 25, 36, 48, 62, 79, 104},
};
constexpr const std::array<int8_t, 16>& LloydMaxLevels(int bits) { return kLloydMaxLevels[bits]; }
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

// What a side's latents are multiplied with, which decides the order of its codes.
enum class CodeOrder {
  kForScores,  // K: with a query, over channels
  kForSums,    // V: with weights, over tokens
};

// Neighbouring quads of equal bits.
struct QuadRun {
  int bits;
  int first, count;  // quads
  uint32_t offset;   // of the first, bytes from the start of a block
};

// Layout and per-channel constants of one side of one head group. Built once per fit; read by every
// kernel.
struct PagePlan {
  int rank = 0;          // channels; every one has bits > 0
  int slots = 0;         // 4 * quads, 0 if raw
  int page_tokens = 32;  // T, a multiple of 32
  int group_size = 32;   // tokens per scale, divides T
  ScaleFormat scales = ScaleFormat::kMinMax;
  bool raw = false;  // all channels 16 or 32 bits: no scales, value = the stored number
  CodeOrder order = CodeOrder::kForScores;
  std::vector<uint8_t> bits;     // [rank]: 1..8, or 16, or 32
  std::vector<QuadRun> runs;     // most bits first; empty if raw
  std::vector<int16_t> channel;  // [slots], -1: empty
  std::vector<int16_t> slot;     // [rank]
  bool in_order = false;         // slot c is channel c, and none is empty
  uint32_t block_bytes = 0;      // codes of 32 tokens
  uint32_t scale_bytes = 0;      // scales (and zeros) of one page
  // [slots + kChannelPadding], empty if raw; see above. log8: Log8Unit(b), Log8Half(b); others: 1,
  // 0.5; 0 in empty slots.
  std::vector<float> unit, half, mid;
  // Largest integer that a query's products with a are rounded to, so that sums over channels fit
  // 32 bits.
  int most_query = 32767;

  const QuadRun& run_of(int slot) const;
  // First byte of a quad, or of a channel of a raw side, within a block.
  uint32_t quad_offset(int quad) const;
  uint32_t raw_offset(int c) const { return static_cast<uint32_t>(c) * 4u * bits[0]; }
  // Place of a code among the 128 of its quad. lane: 0..3, t: 0..31.
  int CodePlace(int lane, int t) const {
    return order == CodeOrder::kForScores ? 4 * t + lane : t / 4 * 16 + 4 * lane + t % 4;
  }

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
                       int page_tokens = 0, CodeOrder order = CodeOrder::kForScores);
};

}  // namespace palu

#endif  // PALU_SRC_CODEC_PAGE_PLAN_H_
