// File: test_util.h - data with known statistics, error measures and plain attention for the tests.
//
// Data is row-major f32 [B, H, S, D]. All of it comes from fixed seeds through our own generator,
// so a test sees the same numbers on every machine.
#ifndef PALU_TESTS_TEST_UTIL_H_
#define PALU_TESTS_TEST_UTIL_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "base/fp16.h"
#include "palu/palu.h"

namespace palu::test {

using Floats = std::vector<float>;

// ---- random data ----

// splitmix64 and Box-Muller.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567) {}
  uint64_t Bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double Uniform() { return (static_cast<double>(Bits() >> 11) + 0.5) * 0x1p-53; }
  int64_t Between(int64_t low, int64_t high) {  // both ends included
    return low + static_cast<int64_t>(Bits() % static_cast<uint64_t>(high - low + 1));
  }
  double Normal() { return std::sqrt(-2 * std::log(Uniform())) * std::cos(2 * M_PI * Uniform()); }

 private:
  uint64_t state_;
};

inline Floats Gaussian(size_t n, uint64_t seed, double stddev = 1) {
  Random random(seed);
  Floats out(n);
  for (float& x : out) x = static_cast<float>(stddev * random.Normal());
  return out;
}

// Shape of K or V.
struct Dims {
  int64_t batch = 1, heads = 1, tokens = 1, dim = 1;
  size_t size() const { return static_cast<size_t>(batch * heads * tokens * dim); }
  std::array<int64_t, 4> shape() const { return {batch, heads, tokens, dim}; }
  size_t at(int64_t b, int64_t h, int64_t t, int64_t d = 0) const {
    return static_cast<size_t>(((b * heads + h) * tokens + t) * dim + d);
  }
};

// Orthonormal rows [n][dim], n <= dim.
inline std::vector<double> Orthonormal(int n, int dim, uint64_t seed) {
  Random random(seed);
  std::vector<double> rows(static_cast<size_t>(n) * dim);
  for (int i = 0; i < n; ++i) {
    double* row = &rows[static_cast<size_t>(i) * dim];
    for (int d = 0; d < dim; ++d) row[d] = random.Normal();
    for (int pass = 0; pass < 2; ++pass) {
      for (int j = 0; j < i; ++j) {
        const double* other = &rows[static_cast<size_t>(j) * dim];
        double dot = 0;
        for (int d = 0; d < dim; ++d) dot += row[d] * other[d];
        for (int d = 0; d < dim; ++d) row[d] -= dot * other[d];
      }
    }
    double norm = 0;
    for (int d = 0; d < dim; ++d) norm += row[d] * row[d];
    for (int d = 0; d < dim; ++d) row[d] /= std::sqrt(norm);
  }
  return rows;
}

// x = mean + sum_c stddev[c] * N(0, 1) * axis_c + noise * N(0, 1): the heads of a range share mean
// and axes (`groups` as in HeadGroups), the latents are drawn anew for every row.
inline Floats Planted(const Dims& dims, const std::vector<double>& stddev, double noise,
                      uint64_t seed, int groups = 1, double mean_size = 0) {
  const int dim = static_cast<int>(dims.dim), rank = static_cast<int>(stddev.size());
  Floats out(dims.size());
  Random random(seed);
  int g = 0;
  for (const HeadRange& range : HeadGroups(static_cast<int>(dims.heads), groups)) {
    const std::vector<double> axes = Orthonormal(rank, dim, seed + 1000 * ++g);
    Floats mean(dims.dim);
    for (float& x : mean) x = static_cast<float>(mean_size * random.Normal());
    for (int64_t b = 0; b < dims.batch; ++b) {
      for (int64_t h = range.first; h < range.last; ++h) {
        for (int64_t t = 0; t < dims.tokens; ++t) {
          std::vector<double> row(mean.begin(), mean.end());
          for (int c = 0; c < rank; ++c) {
            const double latent = stddev[c] * random.Normal();
            for (int d = 0; d < dim; ++d) row[d] += latent * axes[static_cast<size_t>(c) * dim + d];
          }
          for (int d = 0; d < dim; ++d) {
            out[dims.at(b, h, t, d)] = static_cast<float>(row[d] + noise * random.Normal());
          }
        }
      }
    }
  }
  return out;
}

// n standard deviations first * ratio^i.
inline std::vector<double> Decay(int n, double first, double ratio) {
  std::vector<double> out(n);
  for (int i = 0; i < n; ++i) out[i] = first * std::pow(ratio, i);
  return out;
}

inline RopeParams Rope(int n_rot, double base = 10000, RopePairing pairing = RopePairing::kHalves) {
  RopeParams rope{pairing, {}};
  for (int i = 0; i < n_rot / 2; ++i) {
    rope.inv_freq.push_back(static_cast<float>(std::pow(base, -2.0 * i / n_rot)));
  }
  return rope;
}

// Turns token t of every head to position first + t.
inline void Rotate(const RopeParams& rope, int64_t first, const Dims& dims, Floats* x) {
  const int n = static_cast<int>(rope.inv_freq.size());
  for (int64_t b = 0; b < dims.batch; ++b) {
    for (int64_t h = 0; h < dims.heads; ++h) {
      for (int64_t t = 0; t < dims.tokens; ++t) {
        float* row = &(*x)[dims.at(b, h, t)];
        for (int i = 0; i < n; ++i) {
          float& re = row[rope.pairing == RopePairing::kHalves ? i : 2 * i];
          float& im = row[rope.pairing == RopePairing::kHalves ? i + n : 2 * i + 1];
          const double angle = static_cast<double>(first + t) * rope.inv_freq[i];
          const double a = re, c = im;
          re = static_cast<float>(a * std::cos(angle) - c * std::sin(angle));
          im = static_cast<float>(a * std::sin(angle) + c * std::cos(angle));
        }
      }
    }
  }
}

// Keys as a model makes them: unequal spectrum and a mean before RoPE, then rotated.
inline Floats RopedKeys(const Dims& dims, const RopeParams& rope, uint64_t seed, int groups = 1) {
  Floats keys = Planted(dims, Decay(static_cast<int>(dims.dim), 1.5, 0.95), 0, seed, groups, 0.5);
  Rotate(rope, 0, dims, &keys);
  return keys;
}

// Rows [n][dim], centred, whose singular values are exactly `sigma`; n > sigma.size().
inline Floats WithSingularValues(int n, int dim, const std::vector<double>& sigma, uint64_t seed) {
  const int rank = static_cast<int>(sigma.size());
  const std::vector<double> axes = Orthonormal(rank, dim, seed);
  // Left vectors: orthonormal and orthogonal to the constant vector.
  std::vector<double> left(static_cast<size_t>(rank) * n);
  Random random(seed + 1);
  for (int c = 0; c < rank; ++c) {
    double* row = &left[static_cast<size_t>(c) * n];
    double mean = 0, norm = 0;
    for (int i = 0; i < n; ++i) row[i] = random.Normal();
    for (int pass = 0; pass < 2; ++pass) {
      mean = 0;
      for (int i = 0; i < n; ++i) mean += row[i] / n;
      for (int i = 0; i < n; ++i) row[i] -= mean;
      for (int j = 0; j < c; ++j) {
        const double* other = &left[static_cast<size_t>(j) * n];
        double dot = 0;
        for (int i = 0; i < n; ++i) dot += row[i] * other[i];
        for (int i = 0; i < n; ++i) row[i] -= dot * other[i];
      }
    }
    for (int i = 0; i < n; ++i) norm += row[i] * row[i];
    for (int i = 0; i < n; ++i) row[i] /= std::sqrt(norm);
  }
  Floats out(static_cast<size_t>(n) * dim);
  for (int i = 0; i < n; ++i) {
    for (int d = 0; d < dim; ++d) {
      double sum = 0;
      for (int c = 0; c < rank; ++c) {
        sum += left[static_cast<size_t>(c) * n + i] * sigma[c] *
               axes[static_cast<size_t>(c) * dim + d];
      }
      out[static_cast<size_t>(i) * dim + d] = static_cast<float>(sum);
    }
  }
  return out;
}

// ---- dtypes and slices ----

inline OwnedTensor ToTensor(const Floats& x, const Dims& dims, DType dtype = DType::kF32) {
  OwnedTensor out{std::vector<std::byte>(x.size() * DTypeBytes(dtype)), dtype, dims.shape()};
  for (size_t i = 0; i < x.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(out.data.data() + 4 * i, &x[i], 4);
    } else {
      const uint16_t half = dtype == DType::kF16 ? F32ToF16(x[i]) : F32ToBF16(x[i]);
      std::memcpy(out.data.data() + 2 * i, &half, 2);
    }
  }
  return out;
}

inline Floats ToFloats(const OwnedTensor& x) {
  const size_t n = x.data.size() / DTypeBytes(x.dtype);
  Floats out(n);
  for (size_t i = 0; i < n; ++i) {
    if (x.dtype == DType::kF32) {
      std::memcpy(&out[i], x.data.data() + 4 * i, 4);
    } else {
      uint16_t half;
      std::memcpy(&half, x.data.data() + 2 * i, 2);
      out[i] = x.dtype == DType::kF16 ? F16ToF32(half) : BF16ToF32(half);
    }
  }
  return out;
}

inline Floats RoundedTo(const Floats& x, DType dtype) {
  return ToFloats(ToTensor(x, {1, 1, 1, static_cast<int64_t>(x.size())}, dtype));
}

// Tokens [first, first + n) of a dense f32 block, as a view with the block's strides.
inline ConstTensor Slice(const Floats& x, const Dims& dims, int64_t first, int64_t n) {
  ConstTensor view = ConstTensor::Dense(x.data(), DType::kF32, dims.shape());
  view.data = x.data() + first * dims.dim;
  view.shape[2] = n;
  return view;
}

inline ConstTensor Whole(const Floats& x, const Dims& dims) {
  return Slice(x, dims, 0, dims.tokens);
}

// The same tokens as a dense block of their own.
inline Floats CopySlice(const Floats& x, const Dims& dims, int64_t first, int64_t n) {
  Floats out;
  for (int64_t bh = 0; bh < dims.batch * dims.heads; ++bh) {
    const auto begin = x.begin() + (bh * dims.tokens + first) * dims.dim;
    out.insert(out.end(), begin, begin + n * dims.dim);
  }
  return out;
}

// [1, H, S, D] -> [S, H, D], the order of the one-file oracle.
inline Floats TokenMajor(const Floats& x, const Dims& dims) {
  Floats out(x.size());
  for (int64_t h = 0; h < dims.heads; ++h) {
    for (int64_t t = 0; t < dims.tokens; ++t) {
      std::copy_n(&x[dims.at(0, h, t)], dims.dim, &out[(t * dims.heads + h) * dims.dim]);
    }
  }
  return out;
}

// ---- error measures ----

template <class A, class B>
double RelL2(const A& got, const B& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - want[i], 2);
    norm += std::pow(static_cast<double>(want[i]), 2);
  }
  return got.size() == want.size() ? std::sqrt(error / std::max(norm, 1e-300)) : INFINITY;
}

template <class A, class B>
double MaxAbs(const A& got, const B& want) {
  double worst = got.size() == want.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    const double error = std::fabs(static_cast<double>(got[i]) - want[i]);
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  return worst;
}

template <class A, class B>
double Mse(const A& got, const B& want) {
  double error = 0;
  for (size_t i = 0; i < want.size(); ++i)
    error += std::pow(static_cast<double>(got[i]) - want[i], 2);
  return got.size() == want.size() ? error / static_cast<double>(want.size()) : INFINITY;
}

template <class A, class B>
double Cosine(const A& a, const B& b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += static_cast<double>(a[i]) * b[i];
    aa += static_cast<double>(a[i]) * a[i];
    bb += static_cast<double>(b[i]) * b[i];
  }
  return ab / std::sqrt(std::max(aa * bb, 1e-300));
}

inline bool AllFinite(const Floats& x) {
  return std::all_of(x.begin(), x.end(), [](float v) { return std::isfinite(v); });
}

// ---- plain attention, in double ----

struct AttentionOptions {
  double scale = 0, soft_cap = 0;  // as in AttendArgs
  const float* sinks = nullptr;
  const float* mask = nullptr;  // [n][S]
  bool causal = true;
  int window = 0;  // a query at position p sees positions > p - window
};

// q: [B, Hq, n, Dk], k: [B, H, S, Dk], v: [B, H, S, Dv]; the queries belong to the last n tokens.
inline Floats PlainAttention(const Floats& q, const Dims& qd, const Floats& k, const Dims& kd,
                             const Floats& v, const Dims& vd, const AttentionOptions& o = {}) {
  const Dims od{qd.batch, qd.heads, qd.tokens, vd.dim};
  const double scale = o.scale != 0 ? o.scale : 1 / std::sqrt(static_cast<double>(kd.dim));
  Floats out(od.size());
  std::vector<double> p(static_cast<size_t>(kd.tokens));
  for (int64_t b = 0; b < qd.batch; ++b) {
    for (int64_t h = 0; h < qd.heads; ++h) {
      const int64_t kv = h / (qd.heads / kd.heads);
      for (int64_t i = 0; i < qd.tokens; ++i) {
        const int64_t position = kd.tokens - qd.tokens + i;
        double top = o.sinks ? o.sinks[h] : -INFINITY, sum = 0;
        for (int64_t t = 0; t < kd.tokens; ++t) {
          double s = 0;
          for (int64_t d = 0; d < kd.dim; ++d) {
            s += static_cast<double>(q[qd.at(b, h, i, d)]) * k[kd.at(b, kv, t, d)];
          }
          s *= scale;
          if (o.soft_cap != 0) s = o.soft_cap * std::tanh(s / o.soft_cap);
          if (o.mask) s += o.mask[i * kd.tokens + t];
          if (o.causal && t > position) s = -INFINITY;
          if (o.window > 0 && t <= position - o.window) s = -INFINITY;
          p[t] = s;
          top = std::max(top, s);
        }
        for (double& x : p) sum += x = std::exp(x - top);
        if (o.sinks) sum += std::exp(o.sinks[h] - top);
        for (int64_t d = 0; d < vd.dim; ++d) {
          double value = 0;
          for (int64_t t = 0; t < kd.tokens; ++t) value += p[t] / sum * v[vd.at(b, kv, t, d)];
          out[od.at(b, h, i, d)] = static_cast<float>(value);
        }
      }
    }
  }
  return out;
}

// ---- one layer under test ----

struct LayerOptions {
  int dim_v = 0;  // 0 = as the keys
  int window = 0;
  int batch = 1;
  int threads = 1;
  int64_t context = 0;
};

inline ModelShape OneLayer(int kv_heads, int head_dim, const LayerOptions& o = {}) {
  ModelShape shape;
  shape.layers.push_back({0, kv_heads, head_dim, o.dim_v > 0 ? o.dim_v : head_dim, o.window});
  shape.batch = o.batch;
  shape.threads = o.threads;
  shape.context = o.context;
  return shape;
}

inline KVCache MakeCache(const std::string& config, int kv_heads, int head_dim,
                         const LayerOptions& o = {}) {
  return std::move(
      KVCacheBuilder::ForModel(OneLayer(kv_heads, head_dim, o), KVCacheConfig::Parse(config))[0]);
}

// Appends tokens [first, first + n) and seals.
inline void Feed(KVCache& cache, const Floats& k, const Dims& kd, const Floats& v, const Dims& vd,
                 int64_t first, int64_t n, const RopeParams* rope = nullptr) {
  cache.Append(Slice(k, kd, first, n), Slice(v, vd, first, n), {.position = -1, .rope = rope});
  cache.Seal();
}

// What attention may differ by from float64 on the same codes, relative L2: packed codes meet
// integers of 16 bits.
inline double AttentionError(const KVCache& cache) {
  return cache.config().Encodes() ? 3e-4 : 1e-5;
}

inline Floats Attend(const KVCache& cache, const Floats& q, const Dims& qd, AttendArgs args = {}) {
  const Dims od{qd.batch, qd.heads, qd.tokens, cache.shape().head_dim_v};
  Floats out(od.size(), std::numeric_limits<float>::quiet_NaN());
  args.q = Whole(q, qd);
  cache.Attend(args, MutableTensor::Dense(out.data(), DType::kF32, od.shape()));
  return out;
}

// Everything that can be seen of a cache from outside, for "nothing changed" and "the same" checks.
struct Snapshot {
  int64_t size, nbytes, encoded, code_bytes, scale_bytes, basis_bytes;
  Floats k, v;
  bool operator==(const Snapshot&) const = default;
  friend void PrintTo(const Snapshot& s, std::ostream* out) {
    double sum_k = 0, sum_v = 0;
    for (const float x : s.k) sum_k += x;
    for (const float x : s.v) sum_v += x;
    *out << "size " << s.size << ", nbytes " << s.nbytes << ", encoded " << s.encoded << ", codes "
         << s.code_bytes << ", scales " << s.scale_bytes << ", bases " << s.basis_bytes
         << ", sum of K " << sum_k << ", of V " << sum_v;
  }
};

inline Snapshot Take(const KVCache& cache) {
  const CacheStats s = cache.Stats();
  Snapshot snapshot{cache.size(),
                    cache.nbytes(),
                    s.encoded_tokens,
                    s.code_bytes,
                    s.scale_bytes,
                    s.basis_bytes,
                    {},
                    {}};
  if (cache.size() > 0) {
    const KVCache::KV kv = cache.Reconstruct();
    snapshot.k = ToFloats(kv.k);
    snapshot.v = ToFloats(kv.v);
  }
  return snapshot;
}

// ---- the reference's byte model ----

struct ReferenceModelBytes {
  int64_t latents, bases;
  int64_t total() const { return latents + bases; }
};

// Bytes that the reference's accounting gives one tensor (K or V) of H heads and S tokens; its
// bases are fp32.
inline ReferenceModelBytes ReferenceBytes(int64_t heads, int64_t tokens, int64_t dim, int64_t rank,
                                          int64_t group_size, int64_t groups, int hi_bit = 4,
                                          int lo_bit = 2, double hi_fraction = 0.25) {
  const int64_t n_hi = std::max<int64_t>(
      1, static_cast<int64_t>(std::floor(static_cast<double>(rank) * hi_fraction)));
  const auto bytes = [tokens](int64_t channels, int64_t bits) {
    return (tokens * channels * bits + 7) / 8;
  };
  const int64_t parameters = (tokens + group_size - 1) / group_size * rank * 4;
  return {heads * (bytes(n_hi, hi_bit) + bytes(rank - n_hi, lo_bit) + parameters),
          groups * (dim * rank + dim) * 4};
}

// ---- messages ----

// Runs f, which must throw E; returns the message.
template <class E, class F>
std::string MessageOf(F f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return "";
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

inline void ExpectSays(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos)
        << "'" << part << "' is missing in: " << message;
  }
}

// Runs f, which must throw E with a message that has all parts.
template <class E, class F>
void ExpectThrows(F f, const std::vector<std::string>& parts) {
  ExpectSays(MessageOf<E>(f), parts);
}

}  // namespace palu::test

#endif  // PALU_TESTS_TEST_UTIL_H_
