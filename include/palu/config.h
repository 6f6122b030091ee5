// File: config.h - every option of a cache, its text form, and the checks.
//
//   auto config = palu::KVCacheConfig::Parse("palu:rank=32,hi_bit=4");   // throws ConfigError
//   config.ToString();                                                   // the full, resolved form
//
// Text form: METHOD[:PRESET][,key=value]... where METHOD is a row of the method table (methods.h),
// e.g. "fp16", "palu", "palu:reference", "palu:reference,rank=32", "palu:bits=auto:3".
#ifndef PALU_CONFIG_H_
#define PALU_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace palu {

// What share of a spectrum the energy threshold counts: of sum(sigma) (the reference) or of
// sum(sigma^2).
enum class EnergyRule { kSum, kSquares };
// How the head groups of one tensor agree on a rank.
enum class RankPolicy { kMin, kMax, kPerGroup };
// How bits are given to latent channels.
enum class BitPlan {
  kMixed,     // hi_bit for the first hi_fraction of the channels, lo_bit for the others (the
              // reference)
  kAuto,      // reverse water-filling over channels and heads for a budget (`bits=auto:B`)
  kUniform,   // uniform_bits everywhere (`bits=N`)
  kSchedule,  // SVDq's 8, 4, 2, 1, 1, 0, 0, 0 bits for eight runs of channels (`bits=schedule`)
};
// What latents are projections on.
enum class BasisKind {
  kFit,       // principal axes of the sequence's first tokens
  kFile,      // principal axes of the statistics in a basis file (calibration.h)
  kNone,      // the channels themselves, less their mean; a control
  kHadamard,  // a random rotation that knows nothing of the data; a control
};
// What errors of the keys are measured in when axes and bits are chosen.
enum class KeyMetric {
  kPlain,    // squares of the keys' errors
  kQueries,  // squares of the scores' errors: weighed with the queries' second moment
};
// How the layers share the bits of bits=auto.
enum class Budgets {
  kEqual,   // every layer and side gets them
  kLayers,  // sides that hurt more get more, by the costs in a basis file
};
// One side of one layer, for controls.
struct OneSide {
  int layer = -1;  // -1: none
  bool values = false;
  bool operator==(const OneSide&) const = default;
};
// What is taken from keys before they are projected.
enum class KeyMean {
  kFixed,    // the mean of the keys as they are cached
  kRotated,  // the mean of the un-rotated keys, turned to each key's position
};
// What scales the codes. The last two are those of sibling methods, which name them in the table.
enum class ScaleFormat {
  kMinMax,        // per channel and token group: fp16 scale + fp16 zero, uniform levels (the
                  // reference)
  kLog8,          // per channel and token group: one 8-bit logarithmic scale, no zero, Lloyd-Max
                  // levels
  kTokenMinMax,   // per token and 32 channels: fp16 scale + fp16 zero, uniform levels (KIVI's V)
  kTokenAbsMax,   // per token and 32 channels: fp16 scale, symmetric levels (ggml's q4_0 and q8_0)
  kTokenFactors,  // per token: two floats, their length and an inner product (RaBitQ)
};
// Which moments of the keys are fitted.
enum class KeyFit {
  kPrompt,    // of the rotated keys of the prompt, as they came (the reference)
  kAveraged,  // of un-rotated keys, averaged over all positions of the context
};

struct KVCacheConfig {
  std::string method = "palu";  // a row of the method table

  // -- basis --
  BasisKind basis = BasisKind::kFit;
  std::string basis_file;                    // kFile: its path
  KeyMetric key_metric = KeyMetric::kPlain;  // kQueries needs a file
  std::optional<int> rank;                   // explicit r, 1..head_dim; none = energy rule
  double energy_threshold =
      1.0;  // (0, 1]; share of energy kept; 1 = full rank, let the bits decide
  EnergyRule energy_rule = EnergyRule::kSum;
  RankPolicy rank_policy = RankPolicy::kPerGroup;
  int n_head_groups = 4;  // >= 1, clamped to the number of KV heads
  int joint_heads = 1;    // KV heads whose channels are one latent, >= 1, clamped to the heads;
                          // above 1 n_head_groups does not apply
  KeyFit key_fit = KeyFit::kAveraged;
  KeyMean key_mean = KeyMean::kRotated;  // kRotated needs key_fit=averaged or a file
  // Fit on the first so many tokens; 0 = on the first append. -1 = 8 * head_dim, and in a CellCache
  // a quarter of all cells if that is more, up to 2,048.
  int64_t fit_tokens = -1;

  // -- codes --
  bool quantize_values = true;  // false: value latents stay fp16
  BitPlan bit_plan = BitPlan::kAuto;
  double auto_bits = 4.0;  // kAuto: budget of codes + scales, bits per element of K and V, (0, 8]
  Budgets budgets = Budgets::kLayers;  // kAuto with a basis file that has costs, otherwise equal
  double key_extra = 0;                // kAuto: bits per element moved from values to keys, -4..4
  int hi_bit = 4;                      // kMixed: 1..8
  int lo_bit = 2;                      // kMixed: 1..8, <= hi_bit
  double hi_fraction = 0.25;           // kMixed: [0, 1]
  int uniform_bits = 4;                // kUniform: 1..8
  ScaleFormat scales = ScaleFormat::kLog8;
  int group_size = 32;  // tokens that share a scale: 8, 16, 32, 64 or 128

  // -- exact tokens --
  int sink_tokens = 4;     // first tokens kept exact for ever, 0..4096
  int recent_tokens = 64;  // last tokens kept exact at least, 0..65536
  bool fast = false;  // attention with integers of 8 bits instead of 16; refused where the CPU has
                      // no products of four bytes (SIMD target AVX3_DL)
  int windowed_bits = 8;  // of tokens in layers with a sliding window: 8 = codes per channel and 32
                          // tokens, nothing fitted, no sinks; 16 = exact. Only method palu has 8.

  OneSide only;  // encode only this side of this layer; what `palu fit` measures costs with

  int64_t max_bytes = 0;  // limit of all caches of one builder together; 0 = none

  // Starts from the defaults of the method (methods.h). Throws ConfigError naming the option, the
  // value and the allowed range.
  static KVCacheConfig Parse(std::string_view text);
  // Checks the ranges that need no model. Throws ConfigError.
  void Validate() const;
  // Checks against one layer (rank <= head_dim). Throws ConfigError.
  void ValidateFor(int head_dim) const;
  // Whether the method packs tokens; the others store them as they are.
  bool Encodes() const;
  // Whether layers with a sliding window pack tokens too, in windowed_bits.
  bool EncodesWindows() const;
  // Whether keys are projected on axes that are fitted.
  bool HasBasis() const;
  // A text form that Parse reads back to an equal config.
  std::string ToString() const;

  bool operator==(const KVCacheConfig&) const = default;
};

// One line per option: "name  default  meaning  allowed", for --help and the docs.
std::string DescribeOptions();

}  // namespace palu

#endif  // PALU_CONFIG_H_
