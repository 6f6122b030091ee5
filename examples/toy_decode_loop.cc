// How a host drives the caches: prompt in chunks, then token by token, a fork, a trim, and the
// statistics.
//
// The model is a transformer of two layers with random weights and no training: what it says is
// noise, but every call is the one that a real host makes. Per chunk and layer: Append, Attend,
// Seal.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <span>
#include <vector>

#include "palu/palu.h"

namespace {

constexpr int kLayers = 2;
constexpr int kKvHeads = 2;
constexpr int kQueryHeads = 4;
constexpr int kDim = 32;                    // of a head
constexpr int kWidth = kQueryHeads * kDim;  // of the model
constexpr int kKvWidth = kKvHeads * kDim;
constexpr int kVocabulary = 256;

using Matrix = std::vector<float>;  // [rows, columns]

Matrix RandomMatrix(int rows, int columns, std::mt19937& random, float gain = 1) {
  std::normal_distribution<float> normal(0, gain / std::sqrt(static_cast<float>(columns)));
  Matrix m(static_cast<size_t>(rows) * columns);
  for (float& value : m) value = normal(random);
  return m;
}

// out[rows] = m x
void Multiply(const Matrix& m, std::span<const float> x, std::span<float> out) {
  for (size_t i = 0; i < out.size(); ++i) {
    float sum = 0;
    for (size_t j = 0; j < x.size(); ++j) sum += m[i * x.size() + j] * x[j];
    out[i] = sum;
  }
}

void Normalize(std::span<float> x) {
  float squares = 0;
  for (float value : x) squares += value * value;
  const float factor = 1 / std::sqrt(squares / static_cast<float>(x.size()) + 1e-6f);
  for (float& value : x) value *= factor;
}

class ToyModel {
 public:
  ToyModel() {
    std::mt19937 random(7);
    embedding_ = RandomMatrix(kVocabulary, kWidth, random);
    for (Layer& layer : layers_) {
      layer.q = RandomMatrix(kWidth, kWidth, random,
                             4);  // attention picks a few tokens, as a real one does
      layer.k = RandomMatrix(kKvWidth, kWidth, random);
      layer.v = RandomMatrix(kKvWidth, kWidth, random);
      layer.o = RandomMatrix(kWidth, kWidth, random, 2);
    }
    for (int i = 0; i < kDim / 2; ++i) {
      rope_.inv_freq.push_back(std::pow(10000.0f, -2.0f * static_cast<float>(i) / kDim));
    }
  }

  // Runs tokens through the model on top of what the caches hold; returns the most likely next
  // token.
  int Step(std::span<const int> tokens, std::vector<palu::KVCache>& caches) const {
    const auto n = static_cast<int64_t>(tokens.size());
    const int64_t position = caches[0].size();
    Matrix x(n * kWidth), q(n * kWidth), k(n * kKvWidth), v(n * kKvWidth), attended(n * kWidth);
    for (int64_t t = 0; t < n; ++t) {
      std::copy_n(&embedding_[static_cast<size_t>(tokens[t]) * kWidth], kWidth, &x[t * kWidth]);
      Normalize({&x[t * kWidth], kWidth});
    }
    for (int i = 0; i < kLayers; ++i) {
      const Layer& layer = layers_[i];
      for (int64_t t = 0; t < n; ++t) {
        const std::span<const float> row(&x[t * kWidth], kWidth);
        Multiply(layer.q, row, {&q[t * kWidth], kWidth});
        Multiply(layer.k, row, {&k[t * kKvWidth], kKvWidth});
        Multiply(layer.v, row, {&v[t * kKvWidth], kKvWidth});
        Rotate({&q[t * kWidth], kWidth}, position + t);
        Rotate({&k[t * kKvWidth], kKvWidth}, position + t);
      }
      palu::KVCache& cache = caches[i];
      cache.Append(palu::ConstTensor::Rows(k.data(), n, kKvHeads, kDim),
                   palu::ConstTensor::Rows(v.data(), n, kKvHeads, kDim), {.rope = &rope_});
      cache.Attend({.q = palu::ConstTensor::Rows(q.data(), n, kQueryHeads, kDim)},
                   palu::MutableTensor::Rows(attended.data(), n, kQueryHeads, kDim));
      cache.Seal();
      std::vector<float> update(kWidth);
      for (int64_t t = 0; t < n; ++t) {
        Multiply(layer.o, {&attended[t * kWidth], kWidth}, update);
        for (int d = 0; d < kWidth; ++d) x[t * kWidth + d] += update[d];
        Normalize({&x[t * kWidth], kWidth});
      }
    }
    std::vector<float> logits(kVocabulary);
    Multiply(embedding_, {&x[(n - 1) * kWidth], kWidth}, logits);
    // A token never follows itself, so that the noise does not end in one repeated token.
    logits[tokens.back()] = -INFINITY;
    return static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }

  // n tokens, one by one, starting with `token`.
  std::vector<int> Generate(int token, int n, std::vector<palu::KVCache>& caches) const {
    std::vector<int> out;
    while (static_cast<int>(out.size()) < n) {
      out.push_back(token);
      token = Step({&token, 1}, caches);
    }
    return out;
  }

 private:
  struct Layer {
    Matrix q, k, v, o;
  };

  // RoPE on every head of one row; plane i of a head is its dims (i, i + kDim / 2).
  void Rotate(std::span<float> row, int64_t position) const {
    for (size_t head = 0; head < row.size(); head += kDim) {
      for (size_t i = 0; i < rope_.inv_freq.size(); ++i) {
        const float angle = static_cast<float>(position) * rope_.inv_freq[i];
        float& a = row[head + i];
        float& b = row[head + i + kDim / 2];
        const float turned = a * std::cos(angle) - b * std::sin(angle);
        b = a * std::sin(angle) + b * std::cos(angle);
        a = turned;
      }
    }
  }

  Matrix embedding_;
  Layer layers_[kLayers];
  palu::RopeParams rope_{.pairing = palu::RopePairing::kHalves, .inv_freq = {}};
};

std::vector<palu::KVCache> ForkAll(const std::vector<palu::KVCache>& caches) {
  std::vector<palu::KVCache> copies;
  for (const palu::KVCache& cache : caches) copies.push_back(cache.Fork());
  return copies;
}

void Print(const char* what, const std::vector<int>& tokens) {
  std::printf("%-22s", what);
  for (int token : tokens) std::printf(" %d", token);
  std::printf("\n");
}

bool Expect(bool condition, const char* what) {
  if (!condition) std::printf("wrong: %s\n", what);
  return condition;
}

int Run() {
  const ToyModel model;
  auto caches = palu::KVCacheBuilder::ForModel(palu::ModelShape::Uniform(kLayers, kKvHeads, kDim),
                                               palu::KVCacheConfig::Parse("palu"));
  // A prompt of 2,000 tokens in chunks of 512; from fit_tokens on, tokens are packed as they leave
  // the exact window.
  std::vector<int> prompt(2000);
  std::mt19937 random(3);
  for (int& token : prompt) token = static_cast<int>(random() % kVocabulary);
  int next = 0;
  for (size_t done = 0; done < prompt.size(); done += 512) {
    next = model.Step(std::span(prompt).subspan(done, std::min<size_t>(512, prompt.size() - done)),
                      caches);
  }
  const auto reply = model.Generate(next, 24, caches);
  Print("reply", reply);

  // Two continuations of the same conversation share its pages.
  const int64_t before_fork = palu::KVCacheBuilder::Memory(caches[0]).allocated_bytes;
  auto branch = ForkAll(caches);
  const auto left = model.Generate(1, 8, caches);
  const auto right = model.Generate(2, 8, branch);
  Print("after token 1", left);
  Print("after token 2 (fork)", right);

  // Taking the last 8 tokens back, and saying them again.
  for (palu::KVCache& cache : caches) cache.Trim(8);
  const auto again = model.Generate(1, 8, caches);
  Print("after trim, again", again);

  bool good = Expect(again == left, "the same tokens after a trim give the same continuation");
  good &=
      Expect(!std::equal(left.begin() + 1, left.end(), right.begin() + 1), "the branches differ");
  std::printf("\n%5s %7s %8s %6s %9s %9s %13s\n", "layer", "tokens", "encoded", "exact", "bytes",
              "of fp16", "bits/element");
  for (int i = 0; i < kLayers; ++i) {
    const palu::CacheStats stats = caches[i].Stats();
    std::printf("%5d %7lld %8lld %6lld %9lld %8.1f%% %13.3f\n", i,
                static_cast<long long>(stats.tokens), static_cast<long long>(stats.encoded_tokens),
                static_cast<long long>(stats.exact_tokens), static_cast<long long>(stats.nbytes),
                100.0 * stats.nbytes / stats.fp16_bytes, stats.stored_bits_per_element);
    good &= Expect(stats.tokens == 2032, "2,000 + 24 + 8 tokens are cached");
    good &= Expect(stats.nbytes < stats.fp16_bytes / 2, "less than half of fp16 is allocated");
  }
  std::printf("all caches together: %lld bytes before the fork, %lld with both branches\n",
              static_cast<long long>(before_fork),
              static_cast<long long>(palu::KVCacheBuilder::Memory(caches[0]).allocated_bytes));
  return good ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return Run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
