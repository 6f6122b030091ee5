// File: rope.h - how a layer rotates its keys, read from its graph without any function of ggml.
#ifndef PALU_ADAPTERS_GGML_ROPE_H_
#define PALU_ADAPTERS_GGML_ROPE_H_

#include <ggml.h>

#include <optional>

#include "palu/rope.h"

namespace palu::ggml {

// The ROPE node that a layer's new keys went through: src[0] is followed back from `keys`, a
// SET_ROWS node, through views, copies and norms. Null: there is none (the layer does not rotate).
// op_name: ggml_op_name of the ggml that made the graph.
const ggml_tensor* FindRope(const ggml_tensor* keys, const char* (*op_name)(int op));

// Its angles per position: base, linear and YaRN scaling and the frequency factors of Llama 3 and
// LongRoPE. Multi-section RoPE gives the angles of text, whose first three positions are equal and
// whose fourth is 0. Empty: RopeParams cannot express it (an offset of the rotated dims, vision).
// The frequency factors are read from their tensor.
std::optional<RopeParams> ReadRope(const ggml_tensor* rope);

// The factor by which the node also scales what it rotates (YaRN and LongRoPE).
float RopeMagnitude(const ggml_tensor* rope);

}  // namespace palu::ggml

#endif  // PALU_ADAPTERS_GGML_ROPE_H_
