// File: random_model.h - small GGUF models with random weights, for tests without a download.
#ifndef PALU_TESTS_LLAMA_RANDOM_MODEL_H_
#define PALU_TESTS_LLAMA_RANDOM_MODEL_H_

#include <cstdint>
#include <string>

namespace palu::llama {

// What GGUF needs to say about a model; fields that an architecture does not have are left out of
// the file.
struct RandomModel {
  // llama, qwen2 (biases), qwen2vl (multi-section RoPE), qwen3 (q/k norm), gemma2 (windows, soft
  // caps), gemma3 (windows 5:1, q/k norm), gemma4 (windows, two head sizes, layers that share K and
  // V), phi3 (fused QKV), smollm3 (every fourth layer without RoPE), gpt-oss (sinks, windows,
  // experts), refact (ALiBi), mamba (no attention), deepseek2 (latent attention)
  std::string architecture = "llama";
  int layers = 3, heads = 4, kv_heads = 2, head_dim = 32, embedding = 128, feed_forward = 256;
  int vocabulary = 320;
  int train_context = 2048;
  int window = 0;
  // LongRoPE: two sets of factors, the short one up to this context; 0 = neither.
  int long_rope_original = 0;
  // YaRN: scaled by this factor from original_context on; 0 = none.
  float yarn_factor = 0;
  // A token whose embedding is NaN; -1 = none.
  int nan_token = -1;
  uint32_t seed = 1;
};

// The sizes that a test of `architecture` uses.
RandomModel MakeRandomModel(const std::string& architecture);

// Weights are f32 with a fixed seed: the same file each time. Throws std::runtime_error.
void WriteRandomModel(const RandomModel& model, const std::string& path);

}  // namespace palu::llama

#endif  // PALU_TESTS_LLAMA_RANDOM_MODEL_H_
