#include "random_model.h"

#include <ggml.h>
#include <gguf.h>

#include <cmath>
#include <initializer_list>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

namespace palu::llama {
namespace {

class Writer {
 public:
  explicit Writer(const RandomModel& model)
      : model_(model), random_(model.seed), gguf_(gguf_init_empty(), gguf_free) {
    context_.reset(
        ggml_init({.mem_size = size_t{64} << 20, .mem_buffer = nullptr, .no_alloc = false}));
  }

  void WriteKeys();
  void WriteTensors();
  void Save(const std::string& path) {
    if (!gguf_write_to_file(gguf_.get(), path.c_str(), /*only_meta=*/false))
      throw std::runtime_error("cannot write " + path);
  }

 private:
  bool Is(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (model_.architecture == name) return true;
    }
    return false;
  }
  void Key(const std::string& key, uint32_t value) {
    gguf_set_val_u32(gguf_.get(), (model_.architecture + "." + key).c_str(), value);
  }
  void Key(const std::string& key, int value) { Key(key, static_cast<uint32_t>(value)); }
  void Key(const std::string& key, float value) {
    gguf_set_val_f32(gguf_.get(), (model_.architecture + "." + key).c_str(), value);
  }

  // mean + deviation * Gaussian noise.
  float* Tensor(const std::string& name, std::vector<int64_t> shape, float mean, float deviation) {
    ggml_tensor* t = ggml_new_tensor(context_.get(), GGML_TYPE_F32, static_cast<int>(shape.size()),
                                     shape.data());
    ggml_set_name(t, name.c_str());
    std::normal_distribution<float> noise(mean, deviation);
    auto* data = static_cast<float*>(t->data);
    for (int64_t i = 0; i < ggml_nelements(t); ++i) data[i] = noise(random_);
    gguf_add_tensor(gguf_.get(), t);
    return data;
  }
  // A matrix that keeps the size of its input, times gain.
  void Matrix(const std::string& name, int64_t in, int64_t out, float gain = 1) {
    Tensor(name + ".weight", {in, out}, 0, gain / std::sqrt(static_cast<float>(in)));
  }
  void Norm(const std::string& name, int64_t n) { Tensor(name + ".weight", {n}, 1, 0.1f); }
  void Bias(const std::string& name, int64_t n) { Tensor(name + ".bias", {n}, 0, 0.3f); }

  // gemma4: windowed layers have smaller heads, and the last layers have no K and V of their own.
  bool HasWindow(int layer) const { return layer < kWindowedStart || layer % 2 == 0; }
  int HeadDim(int layer) const {
    return Is({"gemma4"}) && HasWindow(layer) ? model_.head_dim / 2 : model_.head_dim;
  }
  bool HasOwnKv(int layer) const {
    return !Is({"gemma4"}) || layer < model_.layers - kSharedLayers;
  }

  void Attention(const std::string& block, int layer);
  void LatentAttention(const std::string& block);
  void FeedForward(const std::string& block);
  void Experts(const std::string& block);
  void Mamba(const std::string& block);
  void RopeFactors();

  static constexpr int kWindowedStart = 3, kSharedLayers = 2;  // gemma4
  static constexpr int kExperts = 4, kExpertsUsed = 2;
  static constexpr int kStateSize = 8, kConvolution = 4, kTimeRank = 8;       // mamba
  static constexpr int kLatentRank = 32, kLatentRope = 16, kLatentHead = 32;  // deepseek2

  const RandomModel& model_;
  std::mt19937 random_;
  std::unique_ptr<gguf_context, decltype(&gguf_free)> gguf_;
  struct FreeContext {
    void operator()(ggml_context* c) const { ggml_free(c); }
  };
  std::unique_ptr<ggml_context, FreeContext> context_;
};

void Writer::WriteKeys() {
  const RandomModel& m = model_;
  gguf_set_val_str(gguf_.get(), "general.architecture", m.architecture.c_str());
  gguf_set_val_str(gguf_.get(), "general.name", ("random " + m.architecture).c_str());
  gguf_set_val_str(gguf_.get(), "tokenizer.ggml.model", "no_vocab");
  Key("vocab_size", m.vocabulary);
  Key("context_length", m.train_context);
  Key("embedding_length", m.embedding);
  Key("block_count", m.layers);
  Key("feed_forward_length", m.feed_forward);
  Key("attention.layer_norm_rms_epsilon", 1e-6f);
  if (Is({"mamba"})) {
    Key("ssm.conv_kernel", kConvolution);
    Key("ssm.inner_size", 2 * m.embedding);
    Key("ssm.state_size", kStateSize);
    Key("ssm.time_step_rank", kTimeRank);
    return;
  }
  const bool latent = Is({"deepseek2"});
  Key("attention.head_count", m.heads);
  Key("attention.head_count_kv", latent ? 1 : m.kv_heads);
  Key("attention.key_length", latent ? kLatentRank + kLatentRope : m.head_dim);
  Key("attention.value_length", latent ? kLatentRank : m.head_dim);
  Key("rope.dimension_count", latent ? kLatentRope : m.head_dim);
  Key("rope.freq_base", 10000.0f);
  if (m.window > 0) Key("attention.sliding_window", m.window);
  if (Is({"gemma2"})) {
    Key("attn_logit_softcapping", 2.0f);  // low, so that it is felt with random weights
    Key("final_logit_softcapping", 30.0f);
  }
  if (Is({"qwen2vl"})) {
    const int32_t quarter = m.head_dim / 8;  // sections are counted in pairs of dims
    const int32_t sections[4] = {2 * quarter, quarter, quarter, 0};
    gguf_set_arr_data(gguf_.get(), "qwen2vl.rope.dimension_sections", GGUF_TYPE_INT32, sections, 4);
  }
  if (Is({"gemma4"})) {
    std::vector<uint8_t> windowed(m.layers);
    for (int i = 0; i < m.layers; ++i) windowed[i] = HasWindow(i);
    gguf_set_arr_data(gguf_.get(), "gemma4.attention.sliding_window_pattern", GGUF_TYPE_BOOL,
                      windowed.data(), m.layers);
    Key("attention.shared_kv_layers", kSharedLayers);
    Key("attention.key_length_swa", HeadDim(0));
    Key("attention.value_length_swa", HeadDim(0));
    Key("rope.dimension_count_swa", HeadDim(0));
    Key("embedding_length_per_layer_input", 0);
  }
  if (Is({"gpt-oss"})) {
    Key("expert_count", kExperts);
    Key("expert_used_count", kExpertsUsed);
    Key("expert_feed_forward_length", m.feed_forward);
  }
  if (latent) {
    Key("attention.q_lora_rank", 0);
    Key("attention.kv_lora_rank", kLatentRank);
    Key("attention.key_length_mla", kLatentHead + kLatentRope);
    Key("attention.value_length_mla", kLatentHead);
    Key("leading_dense_block_count", m.layers);
    Key("expert_feed_forward_length", m.feed_forward);
    Key("expert_shared_count", 0);
  }
  if (m.long_rope_original > 0) {
    Key("rope.scaling.original_context_length", m.long_rope_original);
    Key("rope.scaling.attn_factor", 1.19f);
  }
  if (m.yarn_factor > 0) {
    gguf_set_val_str(gguf_.get(), (m.architecture + ".rope.scaling.type").c_str(), "yarn");
    Key("rope.scaling.factor", m.yarn_factor);
    Key("rope.scaling.original_context_length", m.train_context / 4);
  }
}

void Writer::Attention(const std::string& block, int layer) {
  const RandomModel& m = model_;
  const int64_t head_dim = HeadDim(layer), q = m.heads * head_dim, kv = m.kv_heads * head_dim;
  // Scores then have a standard deviation of about 2: attention that is far from flat.
  const float gain = 1.4f;
  if (Is({"phi3"})) {
    Matrix(block + "attn_qkv", m.embedding, q + 2 * kv, gain);
  } else {
    Matrix(block + "attn_q", m.embedding, q, gain);
    if (HasOwnKv(layer)) Matrix(block + "attn_k", m.embedding, kv, gain);
    if (HasOwnKv(layer)) Matrix(block + "attn_v", m.embedding, kv);
  }
  if (Is({"qwen2", "qwen2vl", "gpt-oss"})) {
    Bias(block + "attn_q", q);
    Bias(block + "attn_k", kv);
    Bias(block + "attn_v", kv);
  }
  if (Is({"qwen3", "gemma3", "gemma4"})) {
    // gemma4 does not scale the scores: its norms do.
    const float size = Is({"gemma4"}) ? 0.5f : 1.0f;
    Tensor(block + "attn_q_norm.weight", {head_dim}, size, 0.1f);
    if (HasOwnKv(layer)) Tensor(block + "attn_k_norm.weight", {head_dim}, size, 0.1f);
  }
  Matrix(block + "attn_output", q, m.embedding);
  if (Is({"gpt-oss"})) {
    Bias(block + "attn_output", m.embedding);
    Tensor(block + "attn_sinks.weight", {m.heads}, 1, 1);
  }
}

// Multi-head latent attention in the form that caches latents: K is [latent, rotated part], V a
// part of K.
void Writer::LatentAttention(const std::string& block) {
  const RandomModel& m = model_;
  Matrix(block + "attn_q", m.embedding, m.heads * (kLatentHead + kLatentRope));
  Matrix(block + "attn_kv_a_mqa", m.embedding, kLatentRank + kLatentRope);
  Norm(block + "attn_kv_a_norm", kLatentRank);
  Tensor(block + "attn_k_b.weight", {kLatentHead, kLatentRank, m.heads}, 0, 0.2f);
  Tensor(block + "attn_v_b.weight", {kLatentRank, kLatentHead, m.heads}, 0, 0.2f);
  Matrix(block + "attn_output", m.heads * kLatentHead, m.embedding);
}

void Writer::FeedForward(const std::string& block) {
  const RandomModel& m = model_;
  Norm(block + "ffn_norm", m.embedding);
  if (Is({"phi3"})) {
    Matrix(block + "ffn_up", m.embedding, 2 * m.feed_forward);
  } else {
    Matrix(block + "ffn_gate", m.embedding, m.feed_forward);
    Matrix(block + "ffn_up", m.embedding, m.feed_forward);
  }
  Matrix(block + "ffn_down", m.feed_forward, m.embedding);
}

void Writer::Experts(const std::string& block) {
  const int64_t embedding = model_.embedding, inner = model_.feed_forward;
  Norm(block + "post_attention_norm", embedding);
  Matrix(block + "ffn_gate_inp", embedding, kExperts);
  Bias(block + "ffn_gate_inp", kExperts);
  for (const char* name : {"ffn_gate_exps", "ffn_up_exps"}) {
    Tensor(block + name + ".weight", {embedding, inner, kExperts}, 0,
           1 / std::sqrt(static_cast<float>(embedding)));
    Tensor(block + name + ".bias", {inner, kExperts}, 0, 0.1f);
  }
  Tensor(block + "ffn_down_exps.weight", {inner, embedding, kExperts}, 0,
         1 / std::sqrt(static_cast<float>(inner)));
  Tensor(block + "ffn_down_exps.bias", {embedding, kExperts}, 0, 0.1f);
}

void Writer::Mamba(const std::string& block) {
  const int64_t embedding = model_.embedding, inner = 2 * embedding;
  Matrix(block + "ssm_in", embedding, 2 * inner);
  Tensor(block + "ssm_conv1d.weight", {kConvolution, inner}, 0, 0.5f);
  Bias(block + "ssm_conv1d", inner);
  Matrix(block + "ssm_x", inner, kTimeRank + 2 * kStateSize);
  Matrix(block + "ssm_dt", kTimeRank, inner);
  Bias(block + "ssm_dt", inner);
  Tensor(block + "ssm_a", {kStateSize, inner}, -1, 0.1f);
  Tensor(block + "ssm_d", {inner}, 1, 0.1f);
  Matrix(block + "ssm_out", inner, embedding);
}

void Writer::RopeFactors() {
  for (const bool is_long : {false, true}) {
    const int64_t n = model_.head_dim / 2;
    float* factors =
        Tensor(is_long ? "rope_factors_long.weight" : "rope_factors_short.weight", {n}, 1, 0);
    for (int64_t i = 0; i < n; ++i)
      factors[i] = 1 + (is_long ? 2.0f : 0.2f) * static_cast<float>(i) / static_cast<float>(n);
  }
}

void Writer::WriteTensors() {
  const RandomModel& m = model_;
  const bool gemma = Is({"gemma2", "gemma3", "gemma4"});
  // Gemma ties input and output and multiplies the input by sqrt(embedding).
  const float deviation = gemma ? 1 / std::sqrt(static_cast<float>(m.embedding)) : 1;
  float* embedding = Tensor("token_embd.weight", {m.embedding, m.vocabulary}, 0, deviation);
  if (m.nan_token >= 0)
    embedding[int64_t{m.nan_token} * m.embedding] = std::numeric_limits<float>::quiet_NaN();
  Norm("output_norm", m.embedding);
  if (!gemma) Matrix("output", m.embedding, m.vocabulary);
  if (m.long_rope_original > 0) RopeFactors();
  if (Is({"gemma4"})) Tensor("rope_freqs.weight", {m.head_dim / 2}, 3, 0.5f);
  for (int i = 0; i < m.layers; ++i) {
    const std::string block = "blk." + std::to_string(i) + ".";
    Norm(block + "attn_norm", m.embedding);
    if (Is({"mamba"})) {
      Mamba(block);
      continue;
    }
    Is({"deepseek2"}) ? LatentAttention(block) : Attention(block, i);
    Is({"gpt-oss"}) ? Experts(block) : FeedForward(block);
    if (gemma) {
      Norm(block + "post_attention_norm", m.embedding);
      Norm(block + "post_ffw_norm", m.embedding);
    }
  }
}

}  // namespace

RandomModel MakeRandomModel(const std::string& architecture) {
  RandomModel model;
  model.architecture = architecture;
  if (architecture == "llama") model.heads = 6, model.kv_heads = 2;
  if (architecture == "qwen3") model.head_dim = 64;
  if (architecture == "gemma2") model.layers = 4, model.window = 50;
  if (architecture == "gemma3")
    model.layers = 6, model.kv_heads = 1, model.head_dim = 64, model.window = 100;
  if (architecture == "gemma4") model.layers = 6, model.head_dim = 64, model.window = 60;
  if (architecture == "phi3") model.kv_heads = 4, model.long_rope_original = 512;
  if (architecture == "smollm3") model.layers = 4;
  if (architecture == "gpt-oss") model.layers = 4, model.window = 40;
  if (architecture == "refact") model.kv_heads = 1;
  return model;
}

void WriteRandomModel(const RandomModel& model, const std::string& path) {
  Writer writer(model);
  writer.WriteKeys();
  writer.WriteTensors();
  writer.Save(path);
}

}  // namespace palu::llama
