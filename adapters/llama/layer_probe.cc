#include "llama/layer_probe.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <string>

#include "ggml/rope.h"
#include "llama/context.h"
#include "llama/graph.h"
#include "llama/log.h"
#include "palu/errors.h"

namespace palu::llama {
namespace {

// Positions of the first tokens; the window's edge is moved onto them.
constexpr int kOuter = 8;  // one token outside the window of the last token
constexpr int kFirstTokens = 3;

struct Probe {
  bool last_step = false;
  std::vector<LayerInfo> layers;
  std::vector<int> visible;  // per layer: tokens that the last one sees
  std::exception_ptr error;

  LayerInfo* Find(int layer) {
    for (LayerInfo& info : layers) {
      if (info.shape.index == layer) return &info;
    }
    return nullptr;
  }
};

const char* OpName(int op) { return ggml_op_name(static_cast<ggml_op>(op)); }

std::string LayerName(int layer) { return "layer " + std::to_string(layer); }

void OnKeys(Probe& probe, const ggml_tensor* t, int layer) {
  if (!ggml_backend_buffer_is_host(t->view_src->buffer)) {
    throw FormatError(LayerName(layer) + " keeps K outside host memory");
  }
  if (probe.Find(layer) != nullptr)
    throw FormatError(LayerName(layer) + " writes its K more than once per token");
  LayerInfo info;
  info.shape.index = layer;
  const ggml_tensor* rope = ggml::FindRope(t, OpName);
  info.rope = rope ? ggml::ReadRope(rope) : RopeParams{};
  probe.layers.push_back(std::move(info));
}

// Unmasked entries of the last step's only query.
int CountVisible(const ggml_tensor* mask) {
  int count = 0;
  for (int64_t i = 0; i < mask->ne[0]; ++i) {
    const float x = mask->type == GGML_TYPE_F16
                        ? ggml_fp16_to_fp32(static_cast<const ggml_fp16_t*>(mask->data)[i])
                        : static_cast<const float*>(mask->data)[i];
    count += std::isfinite(x);
  }
  return count;
}

void OnAttention(Probe& probe, const ggml_tensor* t, int layer) {
  LayerInfo* info = layer < 0 ? nullptr : probe.Find(layer);
  if (info == nullptr) throw FormatError("attention over something that is not the KV cache");
  const std::string name = LayerName(layer);
  const ggml_tensor* values = t->src[2];
  if (values->view_src == t->src[1]->view_src) {
    throw FormatError(
        name + " has multi-head latent attention (V is a part of K), which is not supported");
  }
  const AttentionNode node = ReadAttention(t);
  if (node.alibi != 0) throw FormatError(name + " has an ALiBi bias, which is not supported");
  if (t->src[3] == nullptr) throw FormatError(name + " attends without a mask");
  if (!ggml_backend_buffer_is_host(t->buffer))
    throw FormatError(name + " attends outside host memory");
  LayerShape shape{.index = layer,
                   .kv_heads = node.kv_heads,
                   .head_dim_k = node.head_dim_k,
                   .head_dim_v = node.head_dim_v};
  const int visible = CountVisible(t->src[3]);
  const size_t slot = info - probe.layers.data();
  if (info->attends > 0 &&
      (probe.visible[slot] != visible || info->shape.kv_heads != shape.kv_heads ||
       info->query_heads != node.query_heads)) {
    throw FormatError(name + " is shared by layers that attend differently");
  }
  info->shape = shape;
  info->query_heads = node.query_heads;
  info->attends += 1;
  probe.visible.resize(probe.layers.size());
  probe.visible[slot] = visible;
}

bool Callback(ggml_tensor* t, bool ask, void* data) {
  Probe& probe = *static_cast<Probe*>(data);
  if (!probe.last_step || probe.error) return !ask;
  const Node node = Classify(t);
  if (ask) return node.kind == NodeKind::kKeys || node.kind == NodeKind::kAttention;
  try {
    if (node.kind == NodeKind::kKeys) OnKeys(probe, t, node.layer);
    if (node.kind == NodeKind::kAttention) OnAttention(probe, t, node.layer);
  } catch (...) {
    probe.error = std::current_exception();
  }
  return !probe.error;
}

void Step(Context& context, std::span<const Token> tokens, int64_t position) {
  const ErrorLog log;
  if (const int code = context.Decode(tokens, position, LogitRows::kLast); code != 0) {
    throw FormatError("llama.cpp cannot run the model (code " + std::to_string(code) + ")" +
                      log.suffix());
  }
}

// Puts the first tokens at the edge of the window of a token at the returned position: of them, at
// kOuter, kOuter + 1 and right before that token, only the first is outside.
int64_t PlaceAtWindowEdge(Context& context, int window) {
  const Token tokens[kFirstTokens] = {};
  Step(context, tokens, kOuter);
  const int last = kOuter + window;
  const int third = kOuter + kFirstTokens - 1;
  if (last - 1 > third) {
    if (!llama_memory_can_shift(context.memory())) {
      throw FormatError(
          "which layers have a sliding window cannot be found: positions in its cache cannot be "
          "shifted");
    }
    llama_memory_seq_add(context.memory(), 0, third, third + 1, last - 1 - third);
  }
  return last;
}

void SetWindows(Probe& probe, int window) {
  const int all = kFirstTokens + 1;
  for (size_t i = 0; i < probe.layers.size(); ++i) {
    LayerShape& shape = probe.layers[i].shape;
    if (probe.layers[i].attends == 0)
      throw FormatError(LayerName(shape.index) +
                        " writes K and V that no FLASH_ATTN_EXT node reads");
    if (window == 0 ? probe.visible[i] == 1 : probe.visible[i] == all) continue;
    if (window == 0 || probe.visible[i] != all - 1) {
      throw FormatError(LayerName(shape.index) +
                        " has a mask that is neither causal nor a sliding window of " +
                        std::to_string(window) + " tokens (a chunked or symmetric window?)");
    }
    shape.window = window;
  }
}

}  // namespace

std::vector<LayerInfo> ProbeLayers(llama_model* model) {
  Probe probe;
  Context context(
      model,
      {.cells = 256, .ubatch = 16, .threads = 1, .callback = Callback, .callback_data = &probe});
  const int window = llama_model_n_swa(model);
  if (window != 0 && window < kFirstTokens)
    throw FormatError("a sliding window of " + std::to_string(window) + " tokens is not supported");
  const int64_t last = window == 0 ? 0 : PlaceAtWindowEdge(context, window);
  probe.last_step = true;
  const Token token = 0;
  Step(context, {&token, 1}, last);
  if (probe.error) std::rethrow_exception(probe.error);
  if (probe.layers.empty()) throw FormatError("it writes no K and V rows that could be taken over");
  SetWindows(probe, window);
  return std::move(probe.layers);
}

}  // namespace palu::llama
