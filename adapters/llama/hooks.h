// File: hooks.h - our caches and our attention inside llama.cpp's graph.
#ifndef PALU_ADAPTERS_LLAMA_HOOKS_H_
#define PALU_ADAPTERS_LLAMA_HOOKS_H_

#include <ggml.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <vector>

#include "llama/graph.h"
#include "llama/layer_probe.h"
#include "llama/session.h"
#include "palu/cache.h"

namespace palu::llama {

// The scheduler's callback. It stops three times per layer: at the writes of K and of V (their rows
// go into our cache) and at the attention node, whose output is ours. The node itself is turned
// into a no-op for the time of the call, so llama.cpp does not compute an attention that nobody
// reads.
//
// Threads: one batch at a time. Nothing is allocated per call.
class Hooks {
 public:
  // caches[i] belongs to layers[i]. Both must outlive the object.
  Hooks(std::span<const LayerInfo> layers, std::span<KVCache> caches);

  // Before llama_decode: the batch's tokens start at `position`.
  void Begin(int64_t position, int tokens);
  // After it. Throws what a hook threw; or, when llama_decode was `complete`, FormatError if it
  // left out a layer.
  void End(bool complete);
  // For the self-test: llama.cpp computes its attention too and goes on with it; ours is only shown
  // beside it. Both are [tokens, heads, head_dim_v] of one attention node.
  using Shadow =
      std::function<void(int layer, std::span<const float> theirs, std::span<const float> ours)>;
  void set_shadow(Shadow shadow) { shadow_ = std::move(shadow); }
  // The observer may be empty; it must not throw anything but palu::Error.
  void set_observer(KvObserver observer) { observer_ = std::move(observer); }
  const KvObserver& observer() const { return observer_; }

  void set_query_observer(QueryObserver observer) { query_observer_ = std::move(observer); }

  static bool Callback(ggml_tensor* t, bool ask, void* self);

 private:
  struct LayerState {
    const ggml_tensor* keys = nullptr;  // rows of this batch, until both are there
    const ggml_tensor* values = nullptr;
    bool appended = false;
    int attends = 0;
  };

  bool Ask(ggml_tensor* t);
  void Handle(ggml_tensor* t);
  void OnRows(const Node& node, const ggml_tensor* rows);
  void OnAttention(const Node& node, ggml_tensor* t);
  void RestoreNode();

  std::span<const LayerInfo> layers_;
  std::span<KVCache> caches_;
  std::vector<int> slot_of_layer_;  // -1: none
  std::vector<LayerState> state_;
  KvObserver observer_;
  QueryObserver query_observer_;
  Shadow shadow_;
  int64_t position_ = 0;
  int tokens_ = 0;
  int waiting_ = -1;  // slot with only one of K and V so far
  ggml_tensor* hidden_ = nullptr;
  std::exception_ptr error_;
};

}  // namespace palu::llama

#endif  // PALU_ADAPTERS_LLAMA_HOOKS_H_
