// The oracle of the kernel tests: every function of the table as its formula, in scalar code, sums
// in double. It is also what CPUs run that have no compiled SIMD target.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/fp16.h"
#include "codec/page_plan.h"
#include "kernels/encode_scalar.h"
#include "kernels/kernels.h"

namespace palu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Code of token t of the page (0..page_tokens - 1).
int ReadCode(const PagePlan& plan, const uint8_t* page, int channel, int t) {
  const uint8_t* plane = page + QuadAt(plan, channel, t);
  const int j = plan.CodePlace(plan.slot[channel] % kQuad, t % kBlockTokens);
  int widths[4];
  const int n = PlaneWidths(plan.bits[channel], widths);
  int code = 0, low = 0;
  for (int i = 0; i < n; ++i) {
    const int p = widths[i];
    const int field = (plane[j % (16 * p)] >> (p * (j / (16 * p)))) & ((1 << p) - 1);
    code |= field << low;
    low += p;
    plane += 16 * p;
  }
  return code;
}

template <typename T>
T Load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// value = a * level + z for the tokens of `group`.
struct Affine {
  float a, z;
};

// Scales of token `t`, for formats where they belong to tokens.
Affine ReadTokenScale(const PagePlan& plan, const uint8_t* page, int t, int channel) {
  const uint8_t* scales = page + plan.code_bytes();
  Affine affine;
  if (plan.scales == ScaleFormat::kTokenMinMax) {
    const int i = channel / kRunChannels * plan.page_tokens + t;
    const uint8_t* zeros = scales + 2 * plan.channel_runs() * plan.page_tokens;
    affine.a = F16ToF32(Load<uint16_t>(scales + 2 * i));
    affine.z = F16ToF32(Load<uint16_t>(zeros + 2 * i)) + affine.a * 0.5f;
  } else if (plan.scales == ScaleFormat::kTokenAbsMax) {
    affine.a =
        F16ToF32(Load<uint16_t>(scales + 2 * (channel / kRunChannels * plan.page_tokens + t)));
    affine.z = 0;
  } else {
    affine.a = Load<float>(scales + 4 * t) * Load<float>(scales + 4 * (plan.page_tokens + t));
    affine.z = affine.a * 0.5f;
  }
  return affine;
}

// Scales of the token group of token `t`, or of the token itself.
Affine ReadScale(const PagePlan& plan, const uint8_t* page, int t, int channel) {
  if (plan.token_scaled()) return ReadTokenScale(plan, page, t, channel);
  const uint8_t* scales = page + plan.code_bytes();
  const int slot = plan.slot[channel], i = t / plan.group_size * plan.slots + slot;
  Affine affine;
  if (plan.scales == ScaleFormat::kMinMax) {
    const uint8_t* zeros = scales + 2 * plan.groups() * plan.slots;
    affine.a = F16ToF32(Load<uint16_t>(scales + 2 * i));
    affine.z = F16ToF32(Load<uint16_t>(zeros + 2 * i)) + affine.a * 0.5f;
  } else {
    affine.a = Log8Value(scales[i]) * plan.unit[slot];
    affine.z = affine.a * plan.half[slot];
  }
  return affine;
}

int Level(const PagePlan& plan, int bits, int code) {
  if (plan.scales == ScaleFormat::kLog8 && bits <= 4) return LloydMaxLevels(bits)[code];
  return code - (1 << (bits - 1));
}

// Latent of `channel` for token `t` of the page (0..page_tokens - 1).
float Decode(const PagePlan& plan, const uint8_t* page, int channel, int t) {
  const int bits = plan.bits[channel];
  if (plan.raw) {
    const uint8_t* const values =
        page + static_cast<size_t>(t / kBlockTokens) * plan.block_bytes + plan.raw_offset(channel);
    if (bits == 16) return F16ToF32(Load<uint16_t>(values + 2 * (t % kBlockTokens)));
    return Load<float>(values + 4 * (t % kBlockTokens));
  }
  const Affine affine = ReadScale(plan, page, t, channel);
  return affine.a * static_cast<float>(Level(plan, bits, ReadCode(plan, page, channel, t))) +
         affine.z;
}

void Score(const ScoreArgs& args) {
  const PagePlan& plan = *args.run.plan;
  for (int i = 0; i < args.rows; ++i) {
    for (int t = 0; t < args.run.n_pages * plan.page_tokens; ++t) {
      const uint8_t* page = args.run.pages[t / plan.page_tokens];
      double sum = 0;
      for (int c = 0; c < plan.rank; ++c) {
        sum += static_cast<double>(args.q[i * args.q_stride + c]) *
               Decode(plan, page, c, t % plan.page_tokens);
      }
      args.out[i * args.out_stride + t] = static_cast<float>(sum);
    }
  }
}

void Accumulate(const AccumulateArgs& args) {
  const PagePlan& plan = *args.run.plan;
  for (int i = 0; i < args.rows; ++i) {
    for (int c = 0; c < plan.rank; ++c) {
      double sum = args.acc[i * args.acc_stride + c];
      for (int t = 0; t < args.run.n_pages * plan.page_tokens; ++t) {
        const uint8_t* page = args.run.pages[t / plan.page_tokens];
        sum += static_cast<double>(args.p[i * args.p_stride + t]) *
               Decode(plan, page, c, t % plan.page_tokens);
      }
      args.acc[i * args.acc_stride + c] = static_cast<float>(sum);
    }
  }
}

// Straight from the tables, wave by wave.
void WaveScores(const WaveArgs& args) {
  const WavePlan& plan = *args.plan;
  const auto add = [&](int row, int block, int token, int plane, double cosine, double sine) {
    const float* const q = args.q + static_cast<int64_t>(row) * 2 * plan.planes;
    const double re = q[plane], im = q[plan.planes + plane];
    const double c = plan.cos_block[plane * kWaveBlocks + block];
    const double s = plan.sin_block[plane * kWaveBlocks + block];
    const double sum = (re * c + im * s) * cosine + (im * c - re * s) * sine;
    args.out[row * args.out_stride + block * kWaveBlock + token] += static_cast<float>(sum);
  };
  for (int i = 0; i < args.rows; ++i) {
    for (int t = 0; t < args.n_blocks * kWaveBlock; ++t) {
      const int block = t / kWaveBlock, token = t % kWaveBlock;
      const int near = token < kWaveHalf ? kWaveHalf - 1 - token : token - kWaveHalf;
      const double sign = token < kWaveHalf ? -1 : 1, y = (near + 0.5) / kWaveHalf;
      for (size_t f = 0; f < plan.fast.size(); ++f) {
        add(i, block, token, plan.fast[f], plan.cos_near[f * kWaveHalf + near],
            sign * plan.sin_near[f * kWaveHalf + near]);
      }
      for (size_t j = 0; j < plan.slow.size(); ++j) {
        const float* const e = &plan.even[j * kWaveTerms];
        const float* const o = &plan.odd[j * kWaveTerms];
        add(i, block, token, plan.slow[j], e[0] + y * y * (e[1] + y * y * e[2]),
            sign * y * (o[0] + y * y * (o[1] + y * y * o[2])));
      }
    }
  }
}

void DecodeBlock(const PagePlan& plan, const uint8_t* page, int block, float* out) {
  for (int c = 0; c < plan.rank; ++c) {
    for (int t = 0; t < kBlockTokens; ++t) {
      out[c * kBlockTokens + t] = Decode(plan, page, c, block * kBlockTokens + t);
    }
  }
}

void DecodeBlockTokens(const PagePlan& plan, const uint8_t* page, int block, float* out,
                       int64_t out_stride) {
  for (int t = 0; t < kBlockTokens; ++t) {
    for (int c = 0; c < plan.rank; ++c) {
      out[t * out_stride + c] = Decode(plan, page, c, block * kBlockTokens + t);
    }
  }
}

// --- encode ---

// Root mean square of n values (a multiple of 8). The order of the sum is part of the format's
// definition: eight partial sums, then those in order, so that every implementation gets the same
// scale.
float RootMeanSquare(const float* x, int n) {
  double partial[8] = {};
  for (int i = 0; i < n; ++i) partial[i % 8] += static_cast<double>(x[i]) * x[i];
  double sum = 0;
  for (const double s : partial) sum += s;
  return static_cast<float>(std::sqrt(sum / n));
}

// The positive level nearest to y >= 0.
float NearestMagnitude(int bits, float y) {
  const int half = 1 << (bits - 1);
  if (bits > 4) return std::floor(std::min(y, static_cast<float>(half - 1))) + 0.5f;
  const int8_t* levels = &LloydMaxLevels(bits)[half];
  int i = 0;
  while (i + 1 < half && y > 0.5f * static_cast<float>(levels[i] + levels[i + 1])) ++i;
  return levels[i];
}

// Sum of the squared errors of n values (a multiple of 8) under log8 with level unit a. The levels
// are symmetric, so magnitudes suffice. The order of the sum counts as in RootMeanSquare: eight
// partial sums, then halves onto halves.
double SquaredError(int bits, float a, const float* x, int n) {
  double partial[8] = {};
  for (int i = 0; i < n; ++i) {
    const float y = std::fabs(x[i]) / a;
    const double error = y - NearestMagnitude(bits, y);
    partial[i % 8] += error * error;
  }
  for (int half = 4; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) partial[i] += partial[half + i];
  }
  return static_cast<double>(a) * a * partial[0];
}

// The log8 scale of least squared error among the candidates.
uint8_t BestLog8(int bits, const float* x, int n) {
  float anchor = 0;
  if (Log8FollowsRms(bits)) {
    anchor = RootMeanSquare(x, n);
  } else {
    for (int i = 0; i < n; ++i) anchor = std::max(anchor, std::fabs(x[i]));
  }
  const auto [first, last] = CandidatesAround(bits, anchor);
  int best = first;
  double least = std::numeric_limits<double>::infinity();
  for (int e = first; e <= last; ++e) {
    const float a = Log8Value(static_cast<uint8_t>(e)) * Log8Unit(bits);
    const double error = SquaredError(bits, a, x, n);
    if (error < least) least = error, best = e;
  }
  return static_cast<uint8_t>(best);
}

// Writes the scale (and zero) of one channel and group, and returns step and offset such that the
// code of x is the nearest to (x - offset) / step, before the mapping from levels to codes. As
// stored, that is, after rounding.
Affine WriteScale(const PagePlan& plan, const float* x, int group, int channel, uint8_t* page) {
  uint8_t* scales = page + plan.code_bytes();
  const int slot = plan.slot[channel], i = group * plan.slots + slot, n = plan.group_size;
  if (plan.scales == ScaleFormat::kMinMax) {
    const auto [min, max] = std::minmax_element(x, x + n);
    const float steps = static_cast<float>((1 << plan.bits[channel]) - 1);
    const uint16_t scale = SaturatedF16((*max - *min) / steps);
    const uint16_t zero = SaturatedF16((*min * 0.5f + *max * 0.5f) + 0.0f);  // never -0
    StoreScalar(scales + 2 * i, scale);
    StoreScalar(scales + 2 * (plan.groups() * plan.slots + i), zero);
    return {F16ToF32(scale), F16ToF32(zero)};
  }
  const uint8_t scale = BestLog8(plan.bits[channel], x, n);
  scales[i] = scale;
  return {Log8Value(scale) * plan.unit[slot], 0.0f};
}

int NearestCode(const PagePlan& plan, int bits, const Affine& affine, float x) {
  // A group without range gets the middle code everywhere; the code is multiplied by zero.
  const float y = affine.a == 0 ? 0.0f : (x - affine.z) / affine.a;
  const int last = (1 << bits) - 1;
  if (plan.scales == ScaleFormat::kLog8 && bits <= 4) {
    const auto& levels = LloydMaxLevels(bits);
    int code = 0;
    while (code < last && y > 0.5f * static_cast<float>(levels[code] + levels[code + 1])) ++code;
    return code;
  }
  const float middle = 0.5f * static_cast<float>(last);
  return static_cast<int>(std::clamp(std::nearbyint(y + middle), 0.0f, static_cast<float>(last)));
}

void EncodePage(const PagePlan& plan, const float* x, int64_t x_stride, uint8_t* page) {
  if (plan.token_scaled() && !plan.raw) return EncodeTokenScaled(plan, x, x_stride, page);
  std::memset(page, 0, plan.page_bytes());
  for (int c = 0; c < plan.rank; ++c) {
    const float* latents = x + c * x_stride;
    const int bits = plan.bits[c];
    Affine affine{};
    for (int t = 0; t < plan.page_tokens; ++t) {
      if (!plan.raw && t % plan.group_size == 0) {
        affine = WriteScale(plan, latents + t, t / plan.group_size, c, page);
      }
      if (!plan.raw) {
        WriteCode(plan, page, c, t, NearestCode(plan, bits, affine, latents[t]));
        continue;
      }
      uint8_t* const values =
          page + static_cast<size_t>(t / kBlockTokens) * plan.block_bytes + plan.raw_offset(c);
      if (bits == 16) {
        StoreScalar(values + 2 * (t % kBlockTokens), SaturatedF16(latents[t]));
      } else {
        StoreScalar(values + 4 * (t % kBlockTokens), latents[t]);
      }
    }
  }
}

// --- matrices and vectors ---

void Gemm(const GemmArgs& args) {
  for (int i = 0; i < args.m; ++i) {
    for (int j = 0; j < args.n; ++j) {
      float& c = args.c[i * args.ldc + j];
      double sum = args.accumulate ? c : 0.0;
      for (int l = 0; l < args.k; ++l) {
        sum += static_cast<double>(args.a[i * args.lda + l]) * args.b[l * args.ldb + j];
      }
      c = static_cast<float>(sum);
    }
  }
}

void Project(const BasisArgs& args) {
  for (int i = 0; i < args.rows; ++i) {
    for (int c = 0; c < args.rank; ++c) {
      double sum = 0;
      for (int d = 0; d < args.dim; ++d) {
        sum += static_cast<double>(args.x[i * args.x_stride + d]) *
               F16ToF32(args.basis[c * args.stride + d]);
      }
      args.out[i * args.out_stride + c] = static_cast<float>(sum);
    }
  }
}

void Expand(const BasisArgs& args) {
  for (int i = 0; i < args.rows; ++i) {
    for (int d = 0; d < args.dim; ++d) {
      float& out = args.out[i * args.out_stride + d];
      double sum = out;
      for (int c = 0; c < args.rank; ++c) {
        sum += static_cast<double>(args.x[i * args.x_stride + c]) *
               F16ToF32(args.basis[c * args.stride + d]);
      }
      out = static_cast<float>(sum);
    }
  }
}

float ExpSum(float* x, int64_t n, float max) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    x[i] = static_cast<float>(std::exp(static_cast<double>(x[i]) - max));
    sum += x[i];
  }
  return static_cast<float>(sum);
}

float Max(const float* x, int64_t n) {
  float max = -kInf;
  for (int64_t i = 0; i < n; ++i) max = std::max(max, x[i]);
  return max;
}

void SoftCap(float* x, int64_t n, float cap) {
  for (int64_t i = 0; i < n; ++i) {
    x[i] = static_cast<float>(cap * std::tanh(static_cast<double>(x[i]) / cap));
  }
}

void F16ToF32Array(const uint16_t* x, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = F16ToF32(x[i]);
}

void F32ToF16Array(const float* x, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = F32ToF16(x[i]);
}

int64_t FindBad(const float* x, int64_t n, float limit) {
  for (int64_t i = 0; i < n; ++i) {
    if (!(std::fabs(x[i]) <= limit)) return i;
  }
  return -1;
}

}  // namespace

const KernelTable& Reference() {
  static constexpr KernelTable kTable = {
      .name = "reference",
      .byte_products = false,
      .score = Score,
      .accumulate = Accumulate,
      .wave_scores = WaveScores,
      .decode_block = DecodeBlock,
      .decode_block_tokens = DecodeBlockTokens,
      .encode_page = EncodePage,
      .gemm = Gemm,
      .project = Project,
      .expand = Expand,
      .exp_sum = ExpSum,
      .max = Max,
      .soft_cap = SoftCap,
      .f16_to_f32 = F16ToF32Array,
      .f32_to_f16 = F32ToF16Array,
      .find_bad = FindBad,
  };
  return kTable;
}

}  // namespace palu
