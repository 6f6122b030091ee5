#include "bench/synthetic.h"

#include <algorithm>
#include <cmath>

namespace palu::app {
namespace {

constexpr int kBlock = 4096;     // tokens that are made; later ones repeat them
constexpr float kMemory = 0.9f;  // of a channel from one token to the next
constexpr float kQueryRms = 2.0f;
constexpr double kRopeBase = 10000;

// Normal numbers by a generator that is spelled out, so that they are the same everywhere.
class Normals {
 public:
  explicit Normals(uint64_t seed) : state_(seed * 2 + 1) {}
  // The sum of four uniform numbers: near enough to normal, and fast.
  float Next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;  // Knuth's MMIX
    const uint64_t bits = state_ ^ (state_ >> 29);
    float sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>((bits >> (16 * i)) & 0xffff);
    return (sum / 65536.0f - 2.0f) * 1.7320508f;
  }

 private:
  uint64_t state_;
};

// Standard deviation of channel d, of 1 in the mean: near the singular values of keys and values
// that `palu inspect` shows for SmolLM2-135M.
float ChannelSize(int d, int head_dim) {
  const float at = static_cast<float>(d) / static_cast<float>(head_dim);
  return 1.5f * std::exp(-1.6f * at) + std::exp(-32.0f * at);
}

std::vector<float> MakeBlock(int heads, int head_dim, uint64_t seed) {
  Normals normals(seed);
  std::vector<float> block(static_cast<size_t>(heads) * kBlock * head_dim);
  const float fresh = std::sqrt(1 - kMemory * kMemory);
  for (int h = 0; h < heads; ++h) {
    float* rows = &block[static_cast<size_t>(h) * kBlock * head_dim];
    for (int d = 0; d < head_dim; ++d) rows[d] = ChannelSize(d, head_dim) * normals.Next();
    for (int64_t i = head_dim; i < int64_t{kBlock} * head_dim; ++i) {
      const float size = ChannelSize(static_cast<int>(i % head_dim), head_dim);
      rows[i] = kMemory * rows[i - head_dim] + fresh * size * normals.Next();
    }
  }
  return block;
}

}  // namespace

SyntheticTokens::SyntheticTokens(int query_heads, int kv_heads, int head_dim)
    : query_heads_(query_heads),
      kv_heads_(kv_heads),
      head_dim_(head_dim),
      key_block_(MakeBlock(kv_heads, head_dim, 1)),
      value_block_(MakeBlock(kv_heads, head_dim, 2)) {
  rope_.pairing = RopePairing::kInterleaved;
  for (int i = 0; i < head_dim / 2; ++i) {
    rope_.inv_freq.push_back(static_cast<float>(std::pow(kRopeBase, -2.0 * i / head_dim)));
  }
}

void SyntheticTokens::Rotate(int64_t position, float* row) const {
  for (size_t i = 0; i < rope_.inv_freq.size(); ++i) {
    const double angle = static_cast<double>(position) * rope_.inv_freq[i];
    const auto c = static_cast<float>(std::cos(angle)), s = static_cast<float>(std::sin(angle));
    const float x = row[2 * i], y = row[2 * i + 1];
    row[2 * i] = c * x - s * y;
    row[2 * i + 1] = s * x + c * y;
  }
}

void SyntheticTokens::Make(int64_t position, int n) {
  const size_t dim = head_dim_;
  keys_.resize(kv_heads_ * n * dim);
  values_.resize(kv_heads_ * n * dim);
  std::vector<float> turn(dim);  // (cos, sin) of each plane, shared by the heads
  for (int t = 0; t < n; ++t) {
    for (size_t i = 0; i < dim / 2; ++i) {
      turn[2 * i] = 1;
      turn[2 * i + 1] = 0;
    }
    Rotate(position + t, turn.data());
    for (int h = 0; h < kv_heads_; ++h) {
      const size_t from = (static_cast<size_t>(h) * kBlock + (position + t) % kBlock) * dim;
      const size_t to = (static_cast<size_t>(h) * n + t) * dim;
      std::copy_n(&value_block_[from], dim, &values_[to]);
      const float* x = &key_block_[from];
      float* y = &keys_[to];
      for (size_t i = 0; i < dim; i += 2) {
        y[i] = turn[i] * x[i] - turn[i + 1] * x[i + 1];
        y[i + 1] = turn[i + 1] * x[i] + turn[i] * x[i + 1];
      }
    }
  }
}

std::vector<float> SyntheticTokens::Queries(int64_t position, int n) const {
  Normals normals(3);
  std::vector<float> queries(static_cast<size_t>(n) * query_heads_ * head_dim_);
  for (float& x : queries) x = kQueryRms * normals.Next();
  for (int t = 0; t < n; ++t) {
    for (int h = 0; h < query_heads_; ++h) {
      Rotate(position + t, &queries[(static_cast<size_t>(t) * query_heads_ + h) * head_dim_]);
    }
  }
  return queries;
}

}  // namespace palu::app
