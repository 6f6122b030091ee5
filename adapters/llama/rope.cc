#include "llama/rope.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace palu::llama {
namespace {

// The parameters of a ROPE node, in the order ggml stores them.
struct RopeOp {
  int n_dims, mode, original_context;
  float base, scale, ext_factor, attn_factor, beta_fast, beta_slow;
  int sections[4];
  int offset;
  const float* factors;  // [n_dims / 2], or null
};

RopeOp ReadOp(const ggml_tensor* t) {
  const int32_t* p = t->op_params;
  const auto f = [p](int i) {
    float value;
    std::memcpy(&value, p + i, sizeof value);
    return value;
  };
  return {.n_dims = p[1],
          .mode = p[2],
          .original_context = p[4],
          .base = f(5),
          .scale = f(6),
          .ext_factor = f(7),
          .attn_factor = f(8),
          .beta_fast = f(9),
          .beta_slow = f(10),
          .sections = {p[11], p[12], p[13], p[14]},
          .offset = p[15],
          .factors = t->src[2] ? static_cast<const float*>(t->src[2]->data) : nullptr};
}

bool PassesThrough(ggml_op op) {
  switch (op) {
    case GGML_OP_VIEW:
    case GGML_OP_RESHAPE:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
    case GGML_OP_CONT:
    case GGML_OP_CPY:
    case GGML_OP_DUP:
    case GGML_OP_SCALE:
    case GGML_OP_NORM:
    case GGML_OP_RMS_NORM:
    case GGML_OP_L2_NORM:
    case GGML_OP_MUL:  // a norm's weights
      return true;
    default:
      return false;
  }
}

// True when plane i of multi-section RoPE turns by the fourth position, which is 0 for text.
bool TurnsByFourth(const RopeOp& op, int plane) {
  const int* s = op.sections;
  const int total = s[0] + s[1] + s[2] + s[3];
  if (total == 0) return false;
  const int sector = plane % total;
  if (op.mode == GGML_ROPE_TYPE_IMROPE) return sector >= 3 * s[sector % 3];
  return sector >= s[0] + s[1] + s[2];
}

}  // namespace

const ggml_tensor* FindRope(const ggml_tensor* keys) {
  for (const ggml_tensor* t = keys->src[0]; t != nullptr; t = t->src[0]) {
    if (t->op == GGML_OP_ROPE) return t;
    if (!PassesThrough(t->op)) return nullptr;
  }
  return nullptr;
}

std::optional<RopeParams> ReadRope(const ggml_tensor* rope) {
  const RopeOp op = ReadOp(rope);
  const bool interleaved = op.mode == GGML_ROPE_TYPE_NORMAL;
  const bool sections = op.mode == GGML_ROPE_TYPE_MROPE || op.mode == GGML_ROPE_TYPE_IMROPE;
  if (op.offset != 0 || (!interleaved && !sections && op.mode != GGML_ROPE_TYPE_NEOX))
    return std::nullopt;

  RopeParams params;
  params.pairing = interleaved ? RopePairing::kInterleaved : RopePairing::kHalves;
  params.inv_freq.resize(op.n_dims / 2);
  float ramp_dims[2];
  ggml_rope_yarn_corr_dims(op.n_dims, op.original_context, op.base, op.beta_fast, op.beta_slow,
                           ramp_dims);
  for (int i = 0; i < op.n_dims / 2; ++i) {
    if (sections && TurnsByFourth(op, i)) continue;
    const double own =
        std::pow(double{op.base}, -2.0 * i / op.n_dims) / (op.factors ? op.factors[i] : 1.0f);
    // YaRN (arXiv 2309.00071): fast planes keep their own frequency, slow planes are interpolated,
    // a ramp between.
    const double y = (i - ramp_dims[0]) / std::max(0.001f, ramp_dims[1] - ramp_dims[0]);
    const double keep = op.ext_factor * (1.0 - std::clamp(y, 0.0, 1.0));
    params.inv_freq[i] = static_cast<float>(own * (op.scale * (1.0 - keep) + keep));
  }
  return params;
}

float RopeMagnitude(const ggml_tensor* rope) {
  const RopeOp op = ReadOp(rope);
  if (op.ext_factor == 0.0f) return op.attn_factor;
  return op.attn_factor * (1.0f + 0.1f * std::log(1.0f / op.scale));
}

}  // namespace palu::llama
