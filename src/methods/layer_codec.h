// File: layer_codec.h - a method fitted to one layer: bases, bit plans and the layout of its pages.
#ifndef PALU_SRC_METHODS_LAYER_CODEC_H_
#define PALU_SRC_METHODS_LAYER_CODEC_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "base/memory.h"
#include "codec/page_layout.h"
#include "fit/moments.h"
#include "fit/rotated_mean.h"
#include "methods/method_table.h"
#include "methods/side_budgets.h"
#include "palu/spectrum.h"

namespace palu {

// Heads that share pages: one head, or joint_heads of them whose channels lie side by side.
using HeadUnit = HeadRange;

// Transform and codec of the units of one side that share a basis, x being a unit's channels:
//   latent = encoder (x - mean),   x ~ basis^T latent + mean
// An empty mean is zero, an empty basis the identity, an empty encoder the basis.
// Keys with a rotated mean: x is the key less that mean at its position.
struct GroupCodec {
  int units = 1;                           // that share it
  int dim = 0;                             // channels of a unit
  std::vector<float> mean;                 // [D] or empty
  std::vector<RotatedMean> rotated_means;  // one per head of a unit, or none
  std::vector<uint16_t> basis;  // [rank][D] fp16 or empty; orthonormal rows, or columns if rank > D
  std::vector<uint16_t> encoder;  // [rank][D] fp16 or empty
  PagePlan plan;                  // rank, bits, offsets

  int rank() const { return plan.rank; }
};

struct SideCodec {
  std::vector<GroupCodec> groups;
  std::vector<int> group_of_unit;

  const GroupCodec& unit(int u) const { return groups[group_of_unit[u]]; }
  int max_rank() const;
  int basis_rank() const;  // largest rank of a basis, 0 where there is none
  // Bits per element of K (or V) over all heads: of codes, and of codes + scales.
  double CodeBits() const;
  double StoredBits() const;
};

// Immutable once made; shared by forks.
struct LayerCodec {
  std::vector<HeadUnit> units;
  std::vector<int> unit_of_head;  // [H]
  SideCodec k, v;
  PageLayout layout;
  MemoryCharge charge;  // counts basis_bytes()

  int64_t basis_bytes() const { return charge.bytes(); }
};

// Moments of every head group of both sides; the keys' already averaged where the config asks for
// it. A method whose sides are identities needs none.
struct LayerMoments {
  std::vector<HeadUnit> units;    // of all heads, in order
  std::vector<HeadRange> groups;  // of units that share a basis
  std::vector<Moments> k, v;      // one per group, or none
  std::vector<std::vector<RotatedMean>>
      k_means;             // taken from the keys before k was summed, or none
  std::vector<Moments> q;  // metric of the keys' errors, one per group, or none
};

// The units of a layer's heads, and the groups of those that share a basis, as the config has them.
void DivideHeads(const KVCacheConfig& config, const MethodRow& method, int heads,
                 LayerMoments& layer);

// Bits per element that the config gives every layer, whatever the budgets of others.
SideBits EqualBits(const KVCacheConfig& config, int dim_k, int dim_v);

// Runs the fit: axes, ranks, bits, plans. Deterministic in the moments. dim_k, dim_v: head dims;
// bits: budgets of bits=auto.
// Cost: 2 * groups eigenproblems. Throws MemoryError; ConfigError when the data gives a rank that
// the options exclude.
std::shared_ptr<const LayerCodec> FitLayer(const KVCacheConfig& config, const MethodRow& method,
                                           int dim_k, int dim_v, SideBits bits,
                                           const LayerMoments& moments,
                                           const MemoryAccountPtr& account, int threads = 1);

// The pages of the exact window: every head raw, in 16 or 32 bits.
struct WindowFormat {
  PagePlan k, v;
  PageLayout layout;

  WindowFormat(int heads, int dim_k, int dim_v, Codec codec);
};

}  // namespace palu

#endif  // PALU_SRC_METHODS_LAYER_CODEC_H_
