#include "ggml/rope.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <string_view>

namespace palu::ggml {
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

bool PassesThrough(std::string_view op) {
  for (const std::string_view name :
       {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "CONT", "CPY", "DUP", "SCALE", "NORM",
        "RMS_NORM", "L2_NORM", "MUL"}) {  // the last one: a norm's weights
    if (op == name) return true;
  }
  return false;
}

// The plane that turns `turns` times over the original context (YaRN, arXiv 2309.00071, eq. 20).
float PlaneOfTurns(const RopeOp& op, float turns) {
  return op.n_dims * std::log(op.original_context / (turns * 2 * std::numbers::pi_v<float>)) /
         (2 * std::log(op.base));
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

const ggml_tensor* FindRope(const ggml_tensor* keys, const char* (*op_name)(int op)) {
  for (const ggml_tensor* t = keys->src[0]; t != nullptr; t = t->src[0]) {
    const std::string_view op = op_name(static_cast<int>(t->op));
    if (op == "ROPE") return t;
    if (!PassesThrough(op)) return nullptr;
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
  const float ramp_dims[2] = {
      std::max(0.0f, std::floor(PlaneOfTurns(op, op.beta_fast))),
      std::min(op.n_dims - 1.0f, std::ceil(PlaneOfTurns(op, op.beta_slow)))};
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

}  // namespace palu::ggml
