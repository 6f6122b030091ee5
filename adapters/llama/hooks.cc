#include "llama/hooks.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "palu/errors.h"

namespace palu::llama {
namespace {

std::string LayerName(int layer) { return "layer " + std::to_string(layer); }

// Ops that leave every buffer as it is.
bool KeepsBuffers(ggml_op op) {
  return op == GGML_OP_VIEW || op == GGML_OP_RESHAPE || op == GGML_OP_PERMUTE ||
         op == GGML_OP_TRANSPOSE || op == GGML_OP_NONE || op == GGML_OP_SET_ROWS;
}

}  // namespace

Hooks::Hooks(std::span<const LayerInfo> layers, std::span<KVCache> caches)
    : layers_(layers), caches_(caches), state_(layers.size()) {
  for (size_t i = 0; i < layers.size(); ++i) {
    const int layer = layers[i].shape.index;
    slot_of_layer_.resize(std::max<size_t>(slot_of_layer_.size(), layer + 1), -1);
    slot_of_layer_[layer] = static_cast<int>(i);
  }
}

void Hooks::Begin(int64_t position, int tokens) {
  position_ = position;
  tokens_ = tokens;
  waiting_ = -1;
  error_ = nullptr;
  std::fill(state_.begin(), state_.end(), LayerState{});
}

void Hooks::End(bool complete) {
  RestoreNode();
  tokens_ = 0;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  for (size_t i = 0; complete && i < state_.size(); ++i) {
    if (!state_[i].appended || state_[i].attends != layers_[i].attends) {
      throw FormatError(LayerName(layers_[i].shape.index) +
                        " was not computed in llama.cpp's graph");
    }
  }
}

bool Hooks::Callback(ggml_tensor* t, bool ask, void* self) {
  Hooks& hooks = *static_cast<Hooks*>(self);
  // Outside Begin and End (warm-up), and once something failed: let the rest of the graph run
  // through. What it computes is not used.
  if (hooks.tokens_ == 0 || hooks.error_) return !ask;
  try {  // an exception must not cross llama.cpp
    if (ask) return hooks.Ask(t);
    hooks.Handle(t);
    return true;
  } catch (const std::bad_alloc&) {
    hooks.error_ = std::make_exception_ptr(MemoryError("the system has no memory left"));
  } catch (...) {
    hooks.error_ = std::current_exception();
  }
  return false;  // the rest of the graph is not computed
}

bool Hooks::Ask(ggml_tensor* t) {
  const NodeKind kind = Classify(t).kind;
  if (kind == NodeKind::kOther) {
    if (waiting_ >= 0 && !KeepsBuffers(t->op)) {
      throw FormatError(LayerName(layers_[waiting_].shape.index) +
                        " computes between its writes of K and V: " + ggml_op_name(t->op));
    }
    return false;
  }
  if (kind == NodeKind::kAttention && !shadow_) {
    RestoreNode();
    hidden_ = t;
    t->op = GGML_OP_NONE;
  }
  return true;
}

void Hooks::RestoreNode() {
  if (hidden_ != nullptr) hidden_->op = GGML_OP_FLASH_ATTN_EXT;
  hidden_ = nullptr;
}

void Hooks::Handle(ggml_tensor* t) {
  if (t == hidden_) RestoreNode();
  const Node node = Classify(t);
  if (node.layer < 0 || node.layer >= static_cast<int>(slot_of_layer_.size()) ||
      slot_of_layer_[node.layer] < 0) {
    throw FormatError(LayerName(node.layer) +
                      " appeared in llama.cpp's graph only after the model was loaded");
  }
  if (node.kind == NodeKind::kAttention) {
    OnAttention(node, t);
  } else {
    OnRows(node, t->src[0]);
  }
}

void Hooks::OnRows(const Node& node, const ggml_tensor* rows) {
  const int slot = slot_of_layer_[node.layer];
  const LayerInfo& layer = layers_[slot];
  LayerState& state = state_[slot];
  (node.kind == NodeKind::kKeys ? state.keys : state.values) = rows;
  // The first of the two stays where it is until the second has come: Ask saw to it that nothing
  // runs in between.
  waiting_ = slot;
  if (state.keys == nullptr || state.values == nullptr) return;
  waiting_ = -1;
  const ConstTensor k = RowsView(state.keys, layer.shape.kv_heads, layer.shape.head_dim_k);
  const ConstTensor v = RowsView(state.values, layer.shape.kv_heads, layer.shape.head_dim_v);
  if (k.shape[2] != tokens_ || v.shape[2] != tokens_ || state.appended) {
    throw FormatError(LayerName(node.layer) + " wrote " + std::to_string(k.shape[2]) +
                      " tokens of a batch of " + std::to_string(tokens_));
  }
  const RopeParams* rope = layer.rope ? &*layer.rope : nullptr;
  if (observer_) observer_(node.layer, k, v, position_, rope ? *rope : RopeParams{});
  caches_[slot].Append(k, v, {.position = position_, .rope = rope});
  state.appended = true;
}

void Hooks::OnAttention(const Node& node, ggml_tensor* t) {
  const int slot = slot_of_layer_[node.layer];
  const LayerInfo& layer = layers_[slot];
  LayerState& state = state_[slot];
  const AttentionNode attention = ReadAttention(t);
  if (!state.appended || attention.tokens != tokens_ ||
      attention.query_heads != layer.query_heads) {
    throw FormatError(LayerName(node.layer) +
                      " attends with other queries than when the model was loaded");
  }
  MutableTensor out = OutputView(t);
  std::vector<float> ours;
  if (shadow_) {
    ours.resize(ggml_nelements(t));
    out.data = ours.data();
  }
  if (query_observer_) {
    query_observer_(node.layer, QueryView(t), position_, layer.rope ? *layer.rope : RopeParams{});
  }
  caches_[slot].Attend({.q = QueryView(t),
                        .scale = attention.scale,
                        .soft_cap = attention.soft_cap,
                        .sinks = attention.sinks},
                       out);
  if (shadow_) shadow_(node.layer, {static_cast<const float*>(t->data), ours.size()}, ours);
  state.attends += 1;
  if (state.attends == layer.attends) caches_[slot].Seal();
}

}  // namespace palu::llama
