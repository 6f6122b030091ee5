#include "cache/attention_common.h"

#include <algorithm>
#include <string>

#include "base/tensor_io.h"
#include "cache/page_coder.h"
#include "palu/errors.h"

namespace palu {
namespace {

constexpr uint16_t kHalfMinusInf = 0xFC00;
constexpr int64_t kMaskTokens = 256;  // converted at once

}  // namespace

void CheckQueries(const LayerShape& shape, int64_t batch, const ConstTensor& q,
                  const MutableTensor& out) {
  const std::string where = Where(shape);
  CheckTensor(q, (where + "Q").c_str(), {batch, -1, -1, shape.head_dim_k});
  CheckTensor(out, (where + "the output").c_str(),
              {batch, q.shape[1], q.shape[2], shape.head_dim_v});
  if (q.shape[1] % shape.kv_heads != 0) {
    throw InputError(where + "Q has " + std::to_string(q.shape[1]) +
                     " heads; allowed are multiples of the " + std::to_string(shape.kv_heads) +
                     " KV heads");
  }
}

AttendCall::AttendCall(const TokenView& v, const AttendArgs& a, int64_t batch,
                       const MutableTensor& o, HalfMask mask)
    : view(v), args(a), b(batch), out(o), half_mask(mask) {
  n = a.q.shape[2];
  group = static_cast<int>(a.q.shape[1] / shape().kv_heads);
  scale = a.scale != 0 ? a.scale : 1.0f / std::sqrt(static_cast<float>(shape().head_dim_k));
  units = v.codecs.empty() ? HeadGroups(shape().kv_heads, shape().kv_heads) : v.codecs[0]->units;
}

bool HalfMask::Hides(int64_t query, int64_t queries, int64_t first, int64_t count) const {
  if (!data) return false;
  for (int64_t i = 0; i < queries; ++i) {
    const uint16_t* const row = data + (query + i) * stride + first;
    uint16_t differs = 0;  // from -inf, in any of them
    for (int64_t t = 0; t < count; ++t) differs |= row[t] ^ kHalfMinusInf;
    if (differs) return false;
  }
  return true;
}

void PreparedQueries::Prepare(const AttendCall& call, int unit, int64_t first, int64_t n) {
  const int dim = call.shape().head_dim_k;
  const HeadUnit& heads = call.units[unit];
  const int64_t all = n * (heads.last - heads.first);
  rows = n;
  exact.resize(static_cast<size_t>(all) * dim);
  for (int64_t i = 0; i < all; ++i) {
    float* const row = exact.data() + i * dim;
    const int kv_head = heads.first + static_cast<int>(i / n);
    const int64_t r = first + i % n;
    ReadRow(call.args.q, call.b, call.head_of_row(kv_head, r), r / call.group, row);
    for (int d = 0; d < dim; ++d) row[d] *= call.scale;
  }
  latents.resize(call.view.codecs.size());
  for (size_t i = 0; i < latents.size(); ++i) {
    latents[i].Prepare(call.view.codecs[i]->k.unit(unit), exact.data(), heads.last - heads.first, n,
                       dim);
  }
}

void LatentQueries::Prepare(const GroupCodec& codec, const float* q, int heads, int64_t rows,
                            int dim) {
  const auto all = static_cast<size_t>(heads * rows);
  latent.resize(all * static_cast<size_t>(codec.rank()));
  mean_dot.assign(all, 0.0f);
  const int planes = codec.rotated_means.empty() ? 0 : codec.rotated_means[0].planes();
  mean_waves.resize(all * 2 * static_cast<size_t>(planes));
  for (int h = 0; h < heads; ++h) PrepareHead(codec, q + h * rows * dim, h, rows, dim);
}

// Head `head` of the unit: q . mu, and q . basis over the head's channels.
void LatentQueries::PrepareHead(const GroupCodec& codec, const float* q, int head, int64_t rows,
                                int dim) {
  const int rank = codec.rank();
  float* const out = latent.data() + head * rows * rank;
  for (int64_t r = 0; r < rows && !codec.mean.empty(); ++r) {
    float dot = 0;
    for (int d = 0; d < dim; ++d) dot += q[r * dim + d] * codec.mean[head * dim + d];
    mean_dot[head * rows + r] = dot;
  }
  if (!codec.rotated_means.empty()) {
    const RotatedMean& mean = codec.rotated_means[head];
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = head * rows + r;
      mean_dot[row] += mean.Coefficients(q + r * dim, mean_waves.data() + row * 2 * mean.planes());
    }
  }
  if (codec.basis.empty()) {
    // Channels of the other heads of the unit do not meet this head's queries.
    for (int64_t r = 0; r < rows; ++r) {
      std::fill_n(out + r * rank, rank, 0.0f);
      std::copy_n(q + r * dim, dim, out + r * rank + head * dim);
    }
    return;
  }
  Active().project({.basis = codec.basis.data() + head * dim,
                    .stride = codec.dim,
                    .rank = rank,
                    .dim = dim,
                    .x = q,
                    .x_stride = dim,
                    .rows = static_cast<int>(rows),
                    .out = out,
                    .out_stride = rank});
}

namespace {

// AddMeanScores for tokens whose positions follow `position`. queries: LatentQueries::mean_waves.
void AddWaves(const RotatedMean& mean, const std::vector<float>& queries, int64_t position,
              int64_t blocks, float* scores, int64_t stride) {
  const int n = mean.planes();
  const int64_t rows = static_cast<int64_t>(queries.size()) / (2 * n);
  thread_local Waves waves;
  thread_local std::vector<float> turned;
  waves.Prepare(mean.inv_freq());
  const float* const c = waves.Phases(position);
  const float* const s = c + n;
  turned.resize(static_cast<size_t>(rows) * 2 * n);
  for (int64_t r = 0; r < rows; ++r) {
    const float* const from = &queries[r * 2 * n];
    float* const to = &turned[r * 2 * n];
    for (int i = 0; i < n; ++i) {
      to[i] = from[i] * c[i] + from[n + i] * s[i];
      to[n + i] = from[n + i] * c[i] - from[i] * s[i];
    }
  }
  Active().wave_scores({.plan = &waves.plan(),
                        .q = turned.data(),
                        .rows = static_cast<int>(rows),
                        .n_blocks = static_cast<int>(blocks),
                        .out = scores,
                        .out_stride = stride});
}

// The same for the tokens of one block at any positions: those of every aligned run of 32 positions
// that is met are computed together.
void AddScattered(const RotatedMean& mean, const std::vector<float>& queries,
                  const int32_t* positions, float* scores, int64_t stride) {
  const int64_t rows = static_cast<int64_t>(queries.size()) / (2 * mean.planes());
  thread_local std::vector<float> run;
  uint32_t done = 0;
  for (int first = 0; first < kBlockTokens; ++first) {
    if (done >> first & 1) continue;
    const int64_t start = positions[first] / kWaveBlock * kWaveBlock;
    run.assign(static_cast<size_t>(rows) * kWaveBlock, 0.0f);
    AddWaves(mean, queries, start, 1, run.data(), kWaveBlock);
    for (int t = first; t < kBlockTokens; ++t) {
      const int64_t at = positions[t] - start;
      if (at < 0 || at >= kWaveBlock) continue;
      done |= 1u << t;
      for (int64_t r = 0; r < rows; ++r) scores[r * stride + t] += run[r * kWaveBlock + at];
    }
  }
}

}  // namespace

void AddMeanScores(const AttendCall& call, int unit, const LatentQueries& queries,
                   const Segment& segment, int64_t at, int64_t tokens, float* scores,
                   int64_t stride) {
  const GroupCodec& codec = call.view.group(segment, false, unit);
  if (codec.rotated_means.empty() || codec.rotated_means[0].planes() == 0) return;
  const RotatedMean& mean = codec.rotated_means[0];  // all heads rotate alike
  const int64_t first = at / kBlockTokens, end = (at + tokens) / kBlockTokens;
  for (int64_t i = first; i < end;) {
    const BlockPositions block = segment.block(i);
    float* const out = scores + (i - first) * kBlockTokens;
    if (block.list) {
      AddScattered(mean, queries.mean_waves, block.list, out, stride);
      ++i;
      continue;
    }
    int64_t next = i + 1;
    while (next < end && !segment.block(next).list &&
           segment.block(next).first == block.first + (next - i) * kBlockTokens) {
      ++next;
    }
    AddWaves(mean, queries.mean_waves, block.first, next - i, out, stride);
    i = next;
  }
}

void FinishScores(const AttendCall& call, int64_t query, float mean_dot, int64_t first,
                  int64_t count, float* scores) {
  int64_t begin, end;
  call.Visible(query, begin, end);
  begin = std::clamp<int64_t>(begin - first, 0, count);
  end = std::clamp<int64_t>(end - first, begin, count);
  std::fill(scores, scores + begin, kMinusInf);
  std::fill(scores + end, scores + count, kMinusInf);
  if (mean_dot != 0) {
    for (int64_t t = begin; t < end; ++t) scores[t] += mean_dot;
  }
  if (call.args.soft_cap > 0) Active().soft_cap(scores + begin, end - begin, call.args.soft_cap);
  if (call.args.mask) {
    const int64_t stride = call.args.mask_stride ? call.args.mask_stride : call.view.size;
    const float* const mask = call.args.mask + query * stride + first;
    for (int64_t t = begin; t < end; ++t) scores[t] += mask[t];
  }
  for (int64_t t = begin; call.half_mask.data && t < end; t += kMaskTokens) {
    float mask[kMaskTokens];
    const int64_t some = std::min(kMaskTokens, end - t);
    Active().f16_to_f32(call.half_mask.data + query * call.half_mask.stride + first + t, mask,
                        some);
    for (int64_t i = 0; i < some; ++i) scores[t + i] += mask[i];
  }
}

namespace {

// out += latent . B + mu * weight over the channels of head `head` of the unit, for `rows` rows of
// `sums` from `first` on. out: [rows][Dv].
void AddLatents(const GroupCodec& codec, int head, int dim, const LatentSums& sums, int64_t first,
                int64_t rows, float* out) {
  const int rank = codec.rank();
  const float* const latent = sums.latent.data() + first * rank;
  for (int64_t r = 0; r < rows && !codec.mean.empty(); ++r) {
    const float weight = static_cast<float>(sums.weight[first + r]);
    for (int d = 0; d < dim; ++d) out[r * dim + d] += weight * codec.mean[head * dim + d];
  }
  if (codec.basis.empty()) {
    for (int64_t r = 0; r < rows; ++r) {
      const float* const from = latent + r * rank + head * dim;
      for (int d = 0; d < dim; ++d) out[r * dim + d] += from[d];
    }
    return;
  }
  Active().expand({.basis = codec.basis.data() + head * dim,
                   .stride = codec.dim,
                   .rank = rank,
                   .dim = dim,
                   .x = latent,
                   .x_stride = rank,
                   .rows = static_cast<int>(rows),
                   .out = out,
                   .out_stride = dim});
}

}  // namespace

void FinishRows(const AttendCall& call, int kv_head, int64_t first, int64_t rows,
                const RowSum* sums, const std::vector<LatentSums>& latents, int64_t row,
                float* exact) {
  const int dim = call.shape().head_dim_v;
  for (size_t i = 0; i < call.view.codecs.size(); ++i) {
    const LayerCodec& codec = *call.view.codecs[i];
    const int unit = codec.unit_of_head[kv_head];
    AddLatents(codec.v.unit(unit), kv_head - codec.units[unit].first, dim, latents[i], row, rows,
               exact);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int head = call.head_of_row(kv_head, first + r);
    float* const to = exact + r * dim;
    double sum = sums[r].sum, factor = 1;
    if (call.args.sinks) {
      // A sink logit far above the tokens' needs its own maximum.
      const double sink = call.args.sinks[head];
      if (sums[r].sum == 0) {
        sum = 1, factor = 0;
      } else if (sink > sums[r].max) {
        factor = std::exp(sums[r].max - sink);
        sum = sum * factor + 1;
      } else {
        sum += std::exp(sink - sums[r].max);
      }
    }
    // A query that sees no token gets zeros.
    const float weight = sum > 0 ? static_cast<float>(factor / sum) : 0.0f;
    for (int d = 0; d < dim; ++d) to[d] *= weight;
    WriteRow(call.out, call.b, head, (first + r) / call.group, to);
  }
}

}  // namespace palu
