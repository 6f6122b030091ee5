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
};

enum class Codec {
  kF32,     // exact, 32 bits
  kF16,     // exact window format, 16 bits
  kScalar,  // codes of 1..8 bits per channel, scales per token group
};

struct SideMethod {
  Transform transform;
  Codec codec;
  const char* text;  // for listings
};

// A named set of options, applied to a default config.
struct Preset {
  const char* name;
  void (*apply)(KVCacheConfig&);
};

struct MethodRow {
  const char* name;
  SideMethod keys, values;
  std::span<const Preset> presets;

  // Methods without a codec to pack into keep every token in the exact window.
  bool encodes() const { return keys.codec == Codec::kScalar; }
  // Format of the exact window.
  Codec window_codec() const { return encodes() ? Codec::kF16 : keys.codec; }
};

std::span<const MethodRow> MethodTable();
// Throws ConfigError listing the rows.
const MethodRow& FindMethod(std::string_view name);

}  // namespace palu

#endif  // PALU_SRC_METHODS_METHOD_TABLE_H_
