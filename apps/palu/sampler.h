// File: sampler.h - picks the next token from logits.
#ifndef PALU_APPS_SAMPLER_H_
#define PALU_APPS_SAMPLER_H_

#include <cstdint>
#include <deque>
#include <random>
#include <span>
#include <vector>

namespace palu::app {

struct SamplerOptions {
  float temperature = 0;     // 0 = always the likeliest token; 0..10
  int top_k = 40;            // keep the k likeliest; 0 = all
  float top_p = 0.95f;       // then the fewest whose probability reaches this; (0, 1], 1 = all
  float repeat_penalty = 1;  // > 1 makes the last `repeat_last` tokens less likely; 1 = off
  int repeat_last = 64;
  uint64_t seed = 0;
};

// The order is: repeat penalty, top-k, top-p (at temperature 1), temperature, draw. The same seed
// and logits give the same tokens on every machine: the draw uses no implementation-defined
// distribution. Threads: one at a time.
class Sampler {
 public:
  // Throws ConfigError naming the option and its range.
  explicit Sampler(const SamplerOptions& options);

  // These tokens are never picked.
  void Ban(std::vector<int32_t> tokens) { banned_ = std::move(tokens); }
  // Remembers a token for the repeat penalty: each of the prompt, and each that was picked.
  void Accept(int32_t token);
  // logits: [vocabulary]. NaN never wins. Throws InputError when no token has a finite logit.
  int32_t Sample(std::span<const float> logits);

 private:
  int32_t Draw();

  SamplerOptions options_;
  std::mt19937_64 random_;
  std::vector<int32_t> banned_;
  std::deque<int32_t> recent_;
  std::vector<float> logits_;        // scratch, [vocabulary]
  std::vector<int32_t> candidates_;  // scratch
};

}  // namespace palu::app

#endif  // PALU_APPS_SAMPLER_H_
