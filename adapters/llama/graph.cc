#include "llama/graph.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "palu/errors.h"

namespace palu::llama {
namespace {

// N of a name that is exactly `prefix` + N, else -1.
int LayerOfName(const char* name, const char* prefix) {
  const size_t n = std::strlen(prefix);
  if (std::strncmp(name, prefix, n) != 0 || name[n] < '0' || name[n] > '9') return -1;
  char* end = nullptr;
  const long layer = std::strtol(name + n, &end, 10);
  return *end == '\0' ? static_cast<int>(layer) : -1;
}

float FloatParam(const ggml_tensor* t, int index) {
  float value;
  std::memcpy(&value, &t->op_params[index], sizeof value);
  return value;
}

DType TypeOf(const ggml_tensor* t) {
  if (t->type == GGML_TYPE_F32) return DType::kF32;
  if (t->type == GGML_TYPE_F16) return DType::kF16;
  if (t->type == GGML_TYPE_BF16) return DType::kBF16;
  throw FormatError(std::string("llama.cpp's tensor ") + t->name + " has type " +
                    ggml_type_name(t->type) + "; f32, f16 and bf16 are understood");
}

}  // namespace

Node Classify(const ggml_tensor* t) {
  if (t->op == GGML_OP_FLASH_ATTN_EXT) {
    const ggml_tensor* keys = t->src[1];
    return {NodeKind::kAttention,
            keys->view_src ? LayerOfName(keys->view_src->name, "cache_k_l") : -1};
  }
  if (t->op != GGML_OP_SET_ROWS || t->view_src == nullptr) return {};
  if (const int layer = LayerOfName(t->view_src->name, "cache_k_l"); layer >= 0) {
    return {NodeKind::kKeys, layer};
  }
  if (const int layer = LayerOfName(t->view_src->name, "cache_v_l"); layer >= 0) {
    return {NodeKind::kValues, layer};
  }
  return {};
}

AttentionNode ReadAttention(const ggml_tensor* t) {
  const ggml_tensor *q = t->src[0], *k = t->src[1], *v = t->src[2], *sinks = t->src[4];
  return {.query_heads = static_cast<int>(q->ne[2]),
          .kv_heads = static_cast<int>(k->ne[2]),
          .head_dim_k = static_cast<int>(k->ne[0]),
          .head_dim_v = static_cast<int>(v->ne[0]),
          .tokens = static_cast<int>(q->ne[1]),
          .scale = FloatParam(t, 0),
          .alibi = FloatParam(t, 1),
          .soft_cap = FloatParam(t, 2),
          .sinks = sinks ? static_cast<const float*>(sinks->data) : nullptr};
}

ConstTensor RowsView(const ggml_tensor* rows, int heads, int head_dim) {
  const DType dtype = TypeOf(rows);
  const int64_t size = static_cast<int64_t>(ggml_type_size(rows->type));
  if (rows->ne[0] != int64_t{heads} * head_dim || rows->ne[2] != 1 || rows->ne[3] != 1 ||
      static_cast<int64_t>(rows->nb[0]) != size) {
    throw FormatError(std::string("llama.cpp's rows ") + rows->name + " do not have " +
                      std::to_string(heads) + " heads of " + std::to_string(head_dim));
  }
  const int64_t tokens = rows->ne[1], token_stride = static_cast<int64_t>(rows->nb[1]) / size;
  return {.data = rows->data,
          .dtype = dtype,
          .shape = {1, heads, tokens, head_dim},
          .stride = {tokens * token_stride, head_dim, token_stride, 1}};
}

ConstTensor QueryView(const ggml_tensor* t) {
  const ggml_tensor* q = t->src[0];
  const DType dtype = TypeOf(q);
  const int64_t size = static_cast<int64_t>(ggml_type_size(q->type));
  if (static_cast<int64_t>(q->nb[0]) != size || q->ne[3] != 1) {
    throw FormatError(std::string("llama.cpp's query ") + q->name +
                      " is not contiguous along head_dim");
  }
  return {.data = q->data,
          .dtype = dtype,
          .shape = {1, q->ne[2], q->ne[1], q->ne[0]},
          .stride = {static_cast<int64_t>(q->nb[3]) / size, static_cast<int64_t>(q->nb[2]) / size,
                     static_cast<int64_t>(q->nb[1]) / size, 1}};
}

MutableTensor OutputView(ggml_tensor* t) {
  const int64_t head_dim = t->ne[0], heads = t->ne[1], tokens = t->ne[2];
  if (t->type != GGML_TYPE_F32 || !ggml_is_contiguous(t)) {
    throw FormatError(std::string("llama.cpp's attention result ") + t->name + " is not dense f32");
  }
  return MutableTensor::Rows(static_cast<float*>(t->data), tokens, heads, head_dim);
}

}  // namespace palu::llama
