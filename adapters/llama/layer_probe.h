// File: layer_probe.h - what the layers of a model look like, found by running a few tokens.
#ifndef PALU_ADAPTERS_LLAMA_LAYER_PROBE_H_
#define PALU_ADAPTERS_LLAMA_LAYER_PROBE_H_

#include <llama.h>

#include <optional>
#include <vector>

#include "palu/cache.h"
#include "palu/rope.h"

namespace palu::llama {

// One layer that keeps K and V.
struct LayerInfo {
  LayerShape shape;  // index is the layer's number in the model
  int query_heads = 0;
  int attends =
      0;  // attention nodes that read it: more than 1 where later layers share its K and V
  std::optional<RopeParams>
      rope;  // no frequencies: keys are not rotated; null: rotated in a way we cannot state
};

// One entry per layer that writes K and V, in the order of the graph.
//
// Which layers have a sliding window is not in llama.cpp's API. It shows in the masks: with tokens
// at positions just inside and just outside the window of a last token (moved there by shifting
// positions in llama.cpp's cache), a full layer sees all of them, a windowed one all but the outer.
// Cost: at most two small decodes in a context of 256 cells, on one thread (a token or three are
// bound by memory). Errors: FormatError with the reason when the model's attention cannot be taken
// over.
std::vector<LayerInfo> ProbeLayers(llama_model* model);

}  // namespace palu::llama

#endif  // PALU_ADAPTERS_LLAMA_LAYER_PROBE_H_
