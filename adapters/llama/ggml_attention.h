// File: ggml_attention.h - llama.cpp's attention over the K and V of layers, without a model: the
// rival that our attention is timed against.
//
// The graph and the layout of K and V are those that llama.cpp builds (values transposed with
// fa=off), run by the CPU backend that it runs on. Left out is what belongs to no layer's attention
// or is small: projections, RoPE, and the rotation that llama.cpp puts before quantised types.
#ifndef PALU_ADAPTERS_LLAMA_GGML_ATTENTION_H_
#define PALU_ADAPTERS_LLAMA_GGML_ATTENTION_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "palu/tensor.h"

namespace palu::llama {

struct GgmlAttentionOptions {
  std::string cache = "llama:f16";  // llama:TYPE[/TYPE_V][,fa=on|off]
  int query_heads = 1, kv_heads = 1, head_dim = 64;
  int64_t tokens = 256;  // of each layer; its cells are rounded up to 256, as llama.cpp does
  int layers = 1;
  int threads = 1;
};

// Threads: one at a time.
class GgmlAttention {
 public:
  // Errors: ConfigError (cache text, head_dim that the type's blocks do not divide), MemoryError.
  explicit GgmlAttention(const GgmlAttentionOptions& options);
  ~GgmlAttention();

  // Bytes of K and V of one layer, and of what a run of `queries` tokens needs besides.
  static int64_t LayerBytes(const GgmlAttentionOptions& options);
  static int64_t ScratchBytes(const GgmlAttentionOptions& options, int queries);

  // Writes the tokens from `position` on into every layer. k, v: [1, kv_heads, n, head_dim] dense
  // f32. Errors: InputError (beyond `tokens`, another shape).
  void Fill(int64_t position, const ConstTensor& k, const ConstTensor& v);
  // Builds the graphs for queries of the last n tokens, `group` layers in each. q: [n, query_heads,
  // head_dim] f32, the same for every layer. Errors: MemoryError, InputError.
  void Prepare(std::span<const float> q, int n, int group);
  int groups() const;
  // Attends in the layers of one group, one after the other. Errors: StateError (ggml failed).
  void Run(int group);
  // Of the last layer of a group that ran: [n, query_heads, head_dim].
  std::span<const float> Output(int group) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace palu::llama

#endif  // PALU_ADAPTERS_LLAMA_GGML_ATTENTION_H_
