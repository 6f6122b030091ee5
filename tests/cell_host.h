// File: cell_host.h - a host with a cell cache, for tests: it knows what every cell holds, makes
// masks, and attends plainly over the rows that the cache gives back.
#ifndef PALU_TESTS_CELL_HOST_H_
#define PALU_TESTS_CELL_HOST_H_

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/fp16.h"
#include "cache_data.h"
#include "palu/cell_cache.h"

namespace palu::test {

inline constexpr uint16_t kHidden = 0xFC00;  // -inf

struct CellShape {
  std::string name, config;
  int heads = 3, q_heads = 9, dim_k = 64, dim_v = 64;
  int64_t cells = 512;
  int streams = 1;
};

inline void PrintTo(const CellShape& s, std::ostream* out) { *out << s.name; }

// What a host knows of a token.
struct Token {
  int sequence;
  int32_t position;
};

// A host with a cell cache, and the true rows of every cell.
class Host {
 public:
  explicit Host(const CellShape& s, uint64_t seed = 1)
      : shape_(s), rope_(Rope(s.dim_k / 2 * 2)), random_(seed), cache_(Make(s)) {}

  static CellCache Make(const CellShape& s) {
    ModelShape model;
    model.layers = {{0, s.heads, s.dim_k, s.dim_v, 0}};
    model.context = 4096;
    model.threads = 2;
    auto caches =
        KVCacheBuilder::CellsForModel(model, KVCacheConfig::Parse(s.config), s.cells, s.streams);
    return std::move(caches[0]);
  }

  CellCache& cache() { return cache_; }
  const CellCache& cache() const { return cache_; }
  const std::map<int64_t, Token>& tokens() const { return tokens_; }

  // Puts tokens of one sequence into the given cells, at positions from `position` on.
  void Put(int sequence, int32_t position, const std::vector<int64_t>& cells) {
    const auto n = static_cast<int64_t>(cells.size());
    const Dims kd{1, shape_.heads, n, shape_.dim_k}, vd{1, shape_.heads, n, shape_.dim_v};
    Floats k = Planted(kd, Decay(shape_.dim_k, 1.5, 0.95), 0, 77 + text_, 1, 0.5);
    for (float& x : k) x += static_cast<float>(0.3 * random_.Normal());
    Rotate(rope_, position, kd, &k);
    Floats v(vd.size());
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(random_.Normal());
    if (text_ > 0) Squeeze(vd, v);
    const Floats k_rows = TokenMajor(k, kd);
    v_rows_ = TokenMajor(v, vd);
    std::vector<int32_t> positions(cells.size());
    std::iota(positions.begin(), positions.end(), position);
    cache_.PutKeys({.cells = cells.data(),
                    .n = n,
                    .rows = k_rows.data(),
                    .positions = positions.data(),
                    .rope = &rope_});
    cache_.PutValues({.cells = cells.data(), .n = n, .rows = v_rows_.data()});
    for (int64_t i = 0; i < n; ++i) tokens_[cells[i]] = {sequence, position + static_cast<int>(i)};
  }

  // The values of the latest Put, [n][heads * dim_v].
  const Floats& last_values() const { return v_rows_; }
  // Later tokens are of another text: their keys and values lie along other axes.
  void SetText(int text) { text_ = text; }

  void Free(int64_t cell) { tokens_.erase(cell); }
  void Move(int64_t from, int64_t to) { tokens_[to] = tokens_.at(from); }

  // The mask of queries at the positions of their tokens: [n][cells].
  std::vector<uint16_t> Mask(int stream, const std::vector<Token>& queries) const {
    std::vector<uint16_t> mask(queries.size() * shape_.cells, kHidden);
    for (size_t i = 0; i < queries.size(); ++i) {
      for (const auto& [cell, token] : tokens_) {
        if (cell / shape_.cells != stream || token.sequence != queries[i].sequence) continue;
        if (token.position > queries[i].position) continue;
        mask[i * shape_.cells + cell % shape_.cells] = 0;
      }
    }
    return mask;
  }

  Floats Attend(int stream, const std::vector<Token>& queries, uint64_t seed, Floats* want) {
    const auto n = static_cast<int64_t>(queries.size());
    const Dims qd{1, shape_.q_heads, n, shape_.dim_k}, od{1, shape_.q_heads, n, shape_.dim_v};
    const Floats q = Gaussian(qd.size(), seed);
    const std::vector<uint16_t> mask = Mask(stream, queries);
    Floats out(od.size());
    cache_.Attend({.q = Whole(q, qd),
                   .first = stream * shape_.cells,
                   .cells = shape_.cells,
                   .mask = mask.data(),
                   .mask_stride = shape_.cells},
                  MutableTensor::Dense(out.data(), DType::kF32, od.shape()));
    if (want) *want = Plain(stream, q, qd, mask);
    return out;
  }

  // Attention over the rows that Read gives, in double.
  Floats Plain(int stream, const Floats& q, const Dims& qd, const std::vector<uint16_t>& mask) {
    const int64_t first = stream * shape_.cells, cells = shape_.cells;
    const Dims kd{1, shape_.heads, cells, shape_.dim_k}, vd{1, shape_.heads, cells, shape_.dim_v};
    const Floats k = HeadMajor(Rows(false, first, cells), kd);
    const Floats v = HeadMajor(Rows(true, first, cells), vd);
    Floats floats(mask.size());
    for (size_t i = 0; i < mask.size(); ++i) floats[i] = F16ToF32(mask[i]);
    AttentionOptions options;
    options.mask = floats.data();
    options.causal = false;
    return PlainAttention(q, qd, k, kd, v, vd, options);
  }

  Floats Rows(bool values, int64_t first, int64_t n) const {
    Floats rows(n * shape_.heads * (values ? shape_.dim_v : shape_.dim_k));
    cache_.Read(values, first, n, rows.data());
    return rows;
  }

 private:
  // Makes white rows those of the text: few of its axes hold most of them.
  void Squeeze(const Dims& d, Floats& rows) const {
    const int dim = static_cast<int>(d.dim);
    const std::vector<double> axes = Orthonormal(dim, dim, 900 + text_),
                              size = Decay(dim, 1.5, 0.9);
    std::vector<double> out(d.dim);
    for (int64_t row = 0; row < static_cast<int64_t>(rows.size()); row += d.dim) {
      std::fill(out.begin(), out.end(), 0.0);
      for (int c = 0; c < dim; ++c) {
        for (int i = 0; i < dim; ++i) out[i] += size[c] * rows[row + c] * axes[c * dim + i];
      }
      std::copy(out.begin(), out.end(), rows.begin() + row);
    }
  }

  static Floats HeadMajor(const Floats& rows, const Dims& d) {
    Floats out(rows.size());
    for (int64_t h = 0; h < d.heads; ++h) {
      for (int64_t t = 0; t < d.tokens; ++t) {
        std::copy_n(&rows[(t * d.heads + h) * d.dim], d.dim, &out[d.at(0, h, t)]);
      }
    }
    return out;
  }

  CellShape shape_;
  RopeParams rope_;
  Random random_;
  CellCache cache_;
  std::map<int64_t, Token> tokens_;
  int text_ = 0;
  Floats v_rows_;
};

inline std::vector<int64_t> From(int64_t first, int64_t n, int64_t step = 1) {
  std::vector<int64_t> cells(n);
  for (int64_t i = 0; i < n; ++i) cells[i] = first + i * step;
  return cells;
}

// Attention and Read see the same rows, whatever is packed.
inline void ExpectAttends(Host& host, int stream, const std::vector<Token>& queries,
                          double tolerance) {
  Floats want;
  const Floats got = host.Attend(stream, queries, 5, &want);
  EXPECT_LT(RelL2(got, want), tolerance);
}

inline double Tolerance(const CellCache& cache) {
  return cache.Stats().encoded_tokens > 0 ? 3e-4 : 2e-5;
}

}  // namespace palu::test

#endif  // PALU_TESTS_CELL_HOST_H_
