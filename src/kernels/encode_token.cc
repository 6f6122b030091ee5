// Encoders of the formats whose scales belong to tokens: KIVI's values (arXiv 2402.02750), ggml's
// blocks, and RaBitQ (arXiv 2405.12497, more bits after arXiv 2409.09913).
#include <cmath>
#include <vector>

#include "kernels/encode_scalar.h"

namespace palu {
namespace {

// One token's values, channels in order.
struct Token {
  const PagePlan& plan;
  const float* x;  // [rank]
  int t;           // within the page
  uint8_t* page;

  void Write(int channel, int code) const { WriteCode(plan, page, channel, t, code); }
  uint8_t* scales() const { return page + plan.code_bytes(); }
};

// Min and max of every run of channels, as fp16 step and middle.
void EncodeMinMax(const Token& token) {
  const PagePlan& plan = token.plan;
  uint8_t* const zeros = token.scales() + 2 * plan.channel_runs() * plan.page_tokens;
  for (int run = 0; run < plan.channel_runs(); ++run) {
    const int first = run * kRunChannels, last = std::min(first + kRunChannels, plan.rank);
    const auto [min, max] = std::minmax_element(token.x + first, token.x + last);
    const int top = (1 << plan.bits[first]) - 1;
    const uint16_t step = SaturatedF16((*max - *min) / static_cast<float>(top));
    const uint16_t middle = SaturatedF16((*min * 0.5f + *max * 0.5f) + 0.0f);  // never -0
    const int at = 2 * (run * plan.page_tokens + token.t);
    StoreScalar(token.scales() + at, step);
    StoreScalar(zeros + at, middle);
    const float divisor = F16ToF32(step), offset = F16ToF32(middle);
    for (int c = first; c < last; ++c) {
      const float y = divisor == 0 ? 0.0f : (token.x[c] - offset) / divisor;
      const float code = std::nearbyint(y + 0.5f * static_cast<float>(top));
      token.Write(c, static_cast<int>(std::clamp(code, 0.0f, static_cast<float>(top))));
    }
  }
}

// ggml's blocks: at 8 bits the step is the largest magnitude / 127, below it the value of largest
// magnitude / -2^(b-1), so that this value is met.
void EncodeAbsMax(const Token& token) {
  const PagePlan& plan = token.plan;
  for (int run = 0; run < plan.channel_runs(); ++run) {
    const int first = run * kRunChannels, last = std::min(first + kRunChannels, plan.rank);
    const float extreme = *std::max_element(token.x + first, token.x + last, [](float a, float b) {
      return std::fabs(a) < std::fabs(b);
    });
    const int bits = plan.bits[first], half = 1 << (bits - 1);
    const float step =
        bits == 8 ? std::fabs(extreme) / 127.0f : extreme / static_cast<float>(-half);
    StoreScalar(token.scales() + 2 * (run * plan.page_tokens + token.t), SaturatedF16(step));
    for (int c = first; c < last; ++c) {
      const float y = step == 0 ? 0.0f : token.x[c] / step;
      const float level = bits == 8 ? std::round(y) : std::floor(y + 0.5f);
      token.Write(c, std::clamp(static_cast<int>(level), -half, half - 1) + half);
    }
  }
}

// The code whose level + 1/2 is nearest to y. Every channel of a plan has the same bits.
int GridCode(int bits, double y) {
  const int half = 1 << (bits - 1);
  return std::clamp(static_cast<int>(std::floor(y)), -half, half - 1) + half;
}

// Cosine of x and its grid point at step `step`, up to the constant |x|.
double GridCosine(const Token& token, double step) {
  double dot = 0, square = 0;
  const int bits = token.plan.bits[0], half = 1 << (bits - 1);
  for (int c = 0; c < token.plan.rank; ++c) {
    const double g = GridCode(bits, token.x[c] / step) - half + 0.5;
    dot += g * token.x[c];
    square += g * g;
  }
  return dot / std::sqrt(square);
}

// Signs at 1 bit; above, the grid whose step leaves the smallest angle, among 32 steps around those
// of a Gaussian.
void EncodeFactors(const Token& token) {
  const PagePlan& plan = token.plan;
  double square = 0;
  for (int c = 0; c < plan.rank; ++c) square += static_cast<double>(token.x[c]) * token.x[c];
  const double length = std::sqrt(square), rms = std::sqrt(square / std::max(1, plan.rank));
  float factors[2] = {static_cast<float>(length), 0.0f};
  if (length > 0) {
    const int bits = plan.bits[0], half = 1 << (bits - 1);
    double best = rms, best_cosine = -1;
    for (int i = 0; i < 32 && bits > 1; ++i) {
      const double step = rms * (1.0 + i * 0.125) / half;
      const double cosine = GridCosine(token, step);
      if (cosine > best_cosine) best_cosine = cosine, best = step;
    }
    double dot = 0;
    for (int c = 0; c < plan.rank; ++c) {
      const int code = GridCode(bits, token.x[c] / best);
      token.Write(c, code);
      dot += (code - half + 0.5) * token.x[c];
    }
    factors[1] = static_cast<float>(length / dot);
  }
  StoreScalar(token.scales() + 4 * token.t, factors[0]);
  StoreScalar(token.scales() + 4 * (plan.page_tokens + token.t), factors[1]);
}

}  // namespace

void EncodeTokenScaled(const PagePlan& plan, const float* x, int64_t x_stride, uint8_t* page) {
  std::memset(page, 0, plan.page_bytes());
  std::vector<float> values(static_cast<size_t>(plan.rank));
  for (int t = 0; t < plan.page_tokens; ++t) {
    for (int c = 0; c < plan.rank; ++c) values[c] = x[c * x_stride + t];
    const Token token{plan, values.data(), t, page};
    if (plan.scales == ScaleFormat::kTokenMinMax) {
      EncodeMinMax(token);
    } else if (plan.scales == ScaleFormat::kTokenAbsMax) {
      EncodeAbsMax(token);
    } else {
      EncodeFactors(token);
    }
  }
}

}  // namespace palu
