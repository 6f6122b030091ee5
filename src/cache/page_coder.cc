#include "cache/page_coder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "base/fp16.h"
#include "base/tensor_io.h"
#include "kernels/kernels.h"
#include "palu/errors.h"

namespace palu {

std::string Where(const LayerShape& shape) { return "layer " + std::to_string(shape.index) + ": "; }

void CheckValues(const LayerContext& context, const ConstTensor& x, int64_t b, const char* side) {
  const KernelTable& kernels = Active();
  const LayerShape& shape = context.shape;
  const float limit =
      context.method->window_codec() == Codec::kF32 ? std::numeric_limits<float>::max() : kMaxF16;
  const int64_t heads = x.shape[1], tokens = x.shape[2], dim = x.shape[3];
  std::vector<float> copy(static_cast<size_t>(dim));
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < tokens; ++t) {
      const float* row = RowOrNull(x, b, h, t);
      if (!row) ReadRow(x, b, h, t, copy.data()), row = copy.data();
      const int64_t bad = kernels.find_bad(row, dim, limit);
      if (bad < 0) continue;
      const std::string value = std::isnan(row[bad])   ? "NaN"
                                : std::isinf(row[bad]) ? "an infinity"
                                                       : std::to_string(row[bad]);
      throw InputError(Where(shape) + side + " has " + value + " at sequence " + std::to_string(b) +
                       ", head " + std::to_string(h) + ", token " + std::to_string(t) +
                       " of the append, channel " + std::to_string(bad) +
                       "; allowed are finite values of at most " + std::to_string(limit));
    }
  }
}

void CheckRope(const LayerShape& shape, const RopeParams& rope) {
  if (2 * rope.inv_freq.size() > static_cast<size_t>(shape.head_dim_k)) {
    throw InputError(Where(shape) + "rope turns " + std::to_string(2 * rope.inv_freq.size()) +
                     " dims, the keys have " + std::to_string(shape.head_dim_k));
  }
  for (const float f : rope.inv_freq) {
    if (!std::isfinite(f))
      throw InputError(Where(shape) + "rope has a frequency that is not finite");
  }
}

// Value c goes to block position c * 32 + t.
void WriteExactRow(const PagePlan& plan, const float* row, int64_t dim, int t, uint8_t* side) {
  if (plan.bits[0] == 32) {
    for (int64_t c = 0; c < dim; ++c)
      std::memcpy(side + (c * kBlockTokens + t) * sizeof(float), row + c, sizeof(float));
    return;
  }
  uint16_t half[kMaxRank];
  Active().f32_to_f16(row, half, dim);
  for (int64_t c = 0; c < dim; ++c) {
    std::memcpy(side + (c * kBlockTokens + t) * sizeof(uint16_t), half + c, sizeof(uint16_t));
  }
}

namespace {

// Adds the rotated mean of a head at the positions of tokens [t, t + count) of a block.
void AddMeans(const RotatedMean& mean, const BlockPositions& positions, int t, int64_t count,
              float* rows, int dim) {
  if (!positions.list) {
    mean.Add(positions.at(t), count, 1.0f, rows, dim);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    mean.Add(positions.at(t + static_cast<int>(i)), 1, 1.0f, rows + i * dim, dim);
  }
}

// Rows of tokens [t, t + count) of one encoded block, one head of a unit: latents [count][rank] to
// x ~ basis^T latent + mean. basis: that of the group in f32.
void FromLatents(const GroupCodec& group, int head, int dim, const BlockPositions& positions, int t,
                 int64_t count, const float* basis, const float* latents, float* rows) {
  std::fill_n(rows, count * dim, 0.0f);
  if (!group.mean.empty()) {
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(&group.mean[head * dim], dim, rows + i * dim);
    }
  }
  if (group.basis.empty()) {
    for (int64_t i = 0; i < count; ++i) {
      for (int d = 0; d < dim; ++d) rows[i * dim + d] += latents[i * group.dim + head * dim + d];
    }
  } else {
    Active().gemm({.a = latents,
                   .lda = group.rank(),
                   .b = basis + head * dim,
                   .ldb = group.dim,
                   .c = rows,
                   .ldc = dim,
                   .m = static_cast<int>(count),
                   .n = dim,
                   .k = group.rank(),
                   .accumulate = true});
  }
  if (!group.rotated_means.empty()) {
    AddMeans(group.rotated_means[head], positions, t, count, rows, dim);
  }
}

// x[d][t] of head `head` of a unit, 32 tokens, less its mean at their positions.
void TakeMeans(const GroupCodec& group, const BlockPositions& positions, int head, int dim,
               float* x) {
  for (int d = 0; d < dim && !group.mean.empty(); ++d) {
    for (int t = 0; t < kBlockTokens; ++t) x[d * kBlockTokens + t] -= group.mean[head * dim + d];
  }
  if (group.rotated_means.empty()) return;
  thread_local std::vector<float> means;  // [32][D]
  means.assign(static_cast<size_t>(kBlockTokens) * dim, 0.0f);
  AddMeans(group.rotated_means[head], positions, 0, kBlockTokens, means.data(), dim);
  for (int d = 0; d < dim; ++d) {
    for (int t = 0; t < kBlockTokens; ++t) x[d * kBlockTokens + t] -= means[t * dim + d];
  }
}

}  // namespace

void DecodeRows(const TokenView& view, const Segment& segment, int head, bool is_v, int64_t begin,
                int64_t end, float* out) {
  const PageLayout& layout = *segment.layout;
  const LayerCodec* const codec = segment.encoded() ? view.codecs[segment.codec] : nullptr;
  const int unit = codec ? codec->unit_of_head[head] : head;
  const PagePlan& plan = *(is_v ? layout.v : layout.k)[unit];
  const size_t offset = (is_v ? layout.v_offset : layout.k_offset)[unit];
  const LayerShape& shape = view.context->shape;
  const int dim = is_v ? shape.head_dim_v : shape.head_dim_k;
  std::vector<float> tile(static_cast<size_t>(kBlockTokens) * plan.rank), basis;
  const GroupCodec* const group = codec ? &view.group(segment, is_v, unit) : nullptr;
  if (group) {
    basis.resize(group->basis.size());
    Active().f16_to_f32(group->basis.data(), basis.data(), static_cast<int64_t>(basis.size()));
  }
  for (int64_t t = begin; t < end;) {
    const int64_t at = t - segment.first;
    const int block = static_cast<int>(at % layout.page_tokens / kBlockTokens);
    const int column = static_cast<int>(at % kBlockTokens);
    const int64_t count = std::min<int64_t>(kBlockTokens - column, end - t);
    const uint8_t* const page = view.pages[segment.page + at / layout.page_tokens];
    Active().decode_block_tokens(plan, page + offset, block, tile.data(), plan.rank);
    const float* const latents = tile.data() + static_cast<size_t>(column) * plan.rank;
    float* const rows = out + (t - begin) * dim;
    if (group) {
      FromLatents(*group, head - codec->units[unit].first, dim, segment.block(at / kBlockTokens),
                  column, count, basis.data(), latents, rows);
    } else {
      std::copy_n(latents, count * dim, rows);
    }
    t += count;
  }
}

Energy EncodeSide(const LayerContext& context, const LayerCodec& codec, const uint8_t* const* exact,
                  const BlockPositions* positions, int unit, bool is_v, uint8_t* page) {
  const KernelTable& kernels = Active();
  const PageLayout& layout = codec.layout;
  const PageLayout& raw = context.window.layout;
  const HeadUnit& heads = codec.units[unit];
  const GroupCodec& group = (is_v ? codec.v : codec.k).unit(unit);
  const int tokens = layout.page_tokens, width = group.dim, rank = group.rank();
  const int dim = width / (heads.last - heads.first);
  thread_local std::vector<float> scratch;
  scratch.resize(static_cast<size_t>(dim) * kBlockTokens + static_cast<size_t>(width) * tokens +
                 static_cast<size_t>(rank) * (width + tokens));
  float* const block = scratch.data();                // [D][32] of one head
  float* const centred = block + dim * kBlockTokens;  // [unit's D][T]
  float* const encoder = centred + width * tokens;    // [rank][unit's D]
  float* const latent = encoder + rank * width;       // [rank][T]
  const PagePlan& plan = is_v ? context.window.v : context.window.k;
  Energy energy;
  for (int task = 0; task < tokens / kBlockTokens * (heads.last - heads.first); ++task) {
    const int i = task / (heads.last - heads.first), h = task % (heads.last - heads.first);
    kernels.decode_block(plan, exact[i] + (is_v ? raw.v_offset : raw.k_offset)[heads.first + h], 0,
                         block);
    TakeMeans(group, positions[i], h, dim, block);
    for (int d = 0; d < dim; ++d) {
      for (int t = 0; t < kBlockTokens; ++t) {
        const float x = block[d * kBlockTokens + t];
        centred[(h * dim + d) * tokens + i * kBlockTokens + t] = x;
        energy.all += static_cast<double>(x) * x;
      }
    }
  }
  if (group.basis.empty()) {
    std::copy_n(centred, static_cast<int64_t>(width) * tokens, latent);
  } else {
    kernels.f16_to_f32((group.encoder.empty() ? group.basis : group.encoder).data(), encoder,
                       static_cast<int64_t>(rank) * width);
    kernels.gemm({.a = encoder,
                  .lda = width,
                  .b = centred,
                  .ldb = tokens,
                  .c = latent,
                  .ldc = tokens,
                  .m = rank,
                  .n = tokens,
                  .k = width});
  }
  for (int c = 0; c < rank; ++c) {
    double sum = 0;
    for (int t = 0; t < tokens; ++t) {
      const double x = latent[static_cast<int64_t>(c) * tokens + t];
      sum += x * x;
    }
    energy.kept += sum;
    if (!group.plan.raw) energy.lost += std::ldexp(sum, -2 * group.plan.bits[c]);
  }
  // Latents of a weighted fit are no lengths; their share cannot be told.
  if (!group.encoder.empty()) energy.kept = energy.all;
  energy.lost += std::max(0.0, energy.all - energy.kept);
  kernels.encode_page(group.plan, latent, tokens,
                      page + (is_v ? layout.v_offset : layout.k_offset)[unit]);
  return energy;
}

}  // namespace palu
