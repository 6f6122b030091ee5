// File: graph.h - the nodes of llama.cpp's graph that matter to a cache, and views of their data.
//
// Relied on: a layer writes its new K and V rows by the op SET_ROWS into the tensors "cache_k_lN"
// and "cache_v_lN", and attends by the op FLASH_ATTN_EXT over views of them. Nothing else in a
// model's graph is looked at.
#ifndef PALU_ADAPTERS_LLAMA_GRAPH_H_
#define PALU_ADAPTERS_LLAMA_GRAPH_H_

#include <ggml.h>

#include "palu/tensor.h"

namespace palu::llama {

enum class NodeKind { kOther, kKeys, kValues, kAttention };

struct Node {
  NodeKind kind = NodeKind::kOther;
  int layer = -1;  // whose cache is written or read; -1: kAttention over something that is no cache
};

// Called for every node of every graph, so it looks at the op first.
Node Classify(const ggml_tensor* t);

// The tensor of llama.cpp's cache that a kKeys or kValues node writes.
inline const ggml_tensor* CacheTensor(const ggml_tensor* t) { return t->view_src; }

// What a kAttention node computes.
struct AttentionNode {
  int query_heads = 0, kv_heads = 0, head_dim_k = 0, head_dim_v = 0;
  int tokens = 0;
  float scale = 0, alibi = 0, soft_cap = 0;
  const float* sinks = nullptr;  // [query_heads], or null
};
AttentionNode ReadAttention(const ggml_tensor* t);

// src[0] of a kKeys or kValues node, [heads * head_dim, tokens], as [1, heads, tokens, head_dim].
// f32 or f16. Errors: FormatError (another type, dims that are not contiguous or do not multiply
// out).
ConstTensor RowsView(const ggml_tensor* rows, int heads, int head_dim);
// The query of a kAttention node, [head_dim, tokens, heads] with any strides, as [1, heads, tokens,
// head_dim].
ConstTensor QueryView(const ggml_tensor* t);
// Its result, [head_dim, heads, tokens] dense f32, as [1, heads, tokens, head_dim].
MutableTensor OutputView(ggml_tensor* t);

}  // namespace palu::llama

#endif  // PALU_ADAPTERS_LLAMA_GRAPH_H_
