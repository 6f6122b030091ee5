// File: method_table.h - a method is a pair (transform, codec) for keys and one for values; this is
// the table.
#ifndef PALU_SRC_METHODS_METHOD_TABLE_H_
#define PALU_SRC_METHODS_METHOD_TABLE_H_

#include <span>
#include <string_view>

#include "palu/config.h"

namespace palu {

enum class Transform {
  kIdentity,  // channels as they are
  kLowRank,   // latent = (x - mean) projected on a basis shared by a head group
  kTurn,      // latent = a random rotation of x; nothing is fitted
  kRotation,  // latent = a random rotation of (x - mean), the dimension padded to a power of two
};

enum class Codec {
  kF32,          // exact, 32 bits
  kF16,          // exact window format, 16 bits
  kScalar,       // codes of 1..8 bits per channel, scales per channel and token group
  kTokenBlock,   // ggml's blocks: codes of 4 or 8 bits, a symmetric scale per token and 32 channels
  kTokenScalar,  // codes of 1..8 bits, scales per token and 32 channels
  kSigns,        // codes of 1..4 bits, two factors per token
};

inline bool NeedsMoments(Transform t) {
  return t == Transform::kLowRank || t == Transform::kRotation;
}

struct SideMethod {
  Transform transform;
  Codec codec;
  const char* text;            // for listings
  int fixed_bits = 0;          // of every channel; 0 = as the config says
  bool may_stay_fp16 = false;  // quantize_values=false applies
};

// A named set of options, applied to a default config.
struct Preset {
  const char* name;
  void (*apply)(KVCacheConfig&);
};

struct MethodRow {
  const char* name;
  SideMethod keys, values;
  void (*defaults)(KVCacheConfig&);  // what differs from those of KVCacheConfig; may be null
  const char* options;               // keys that apply, separated by spaces; "*" = all
  std::span<const Preset> presets;

  // Methods without a codec to pack into keep every token in the exact window.
  bool encodes() const { return keys.codec != Codec::kF32 && keys.codec != Codec::kF16; }
  // The transforms need statistics of the tokens.
  bool fits() const { return NeedsMoments(keys.transform) || NeedsMoments(values.transform); }
  bool takes(std::string_view option) const;
  // Format of the exact window.
  Codec window_codec() const { return encodes() ? Codec::kF16 : keys.codec; }
};

std::span<const MethodRow> MethodTable();
// Throws ConfigError listing the rows.
const MethodRow& FindMethod(std::string_view name);
// How layers with a sliding window pack tokens where windowed_bits=8: a row of no name, with its
// defaults. Nothing is fitted: such a layer drops a token soon, and a basis would outweigh its
// codes.
const MethodRow& WindowedMethod();
// The config of a method before any option is given.
KVCacheConfig DefaultConfig(const MethodRow& row);

}  // namespace palu

#endif  // PALU_SRC_METHODS_METHOD_TABLE_H_
