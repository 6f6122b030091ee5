// Elementwise functions: exp and sum, max, soft cap, fp16 conversion, the check for bad input.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/vector_ops.cc"
// clang-format off
#include "kernels/targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

#include <limits>

#include "base/fp16.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

constexpr float kInf = std::numeric_limits<float>::infinity();

// exp(x) to 3e-7 relative for x in [-87.33, 88]; 0 below, so also for -inf.
// x = n ln 2 + r with |r| <= ln 2 / 2; the polynomial has the least largest relative error, 9.4e-8,
// among those of degree 5 that are 1 at 0.
HWY_INLINE VF Exp(VF x) {
  const DF df;
  const hn::RebindToSigned<DF> di;
  // Adding it rounds to an integer, which then stands in the lowest bits.
  const VF magic = hn::Set(df, 0x1.8p23f);
  const auto zero = hn::Lt(x, hn::Set(df, -87.33f));
  const VF n_and_magic = hn::MulAdd(x, hn::Set(df, 1.44269504f), magic);
  const VF n = hn::Sub(n_and_magic, magic);
  // ln 2 in two parts, the first with few enough bits for an exact product.
  VF r = hn::NegMulAdd(n, hn::Set(df, 0.693359375f), x);
  r = hn::NegMulAdd(n, hn::Set(df, -2.12194440e-4f), r);
  VF p = hn::Set(df, 0.00829026382f);
  p = hn::MulAdd(p, r, hn::Set(df, 0.0418982059f));
  p = hn::MulAdd(p, r, hn::Set(df, 0.166676387f));
  p = hn::MulAdd(p, r, hn::Set(df, 0.499991477f));
  p = hn::MulAdd(p, r, hn::Set(df, 0.999999702f));
  p = hn::MulAdd(p, r, hn::Set(df, 1.0f));
  // Times 2^n: n goes into the exponent, what is above it falls out.
  const auto power = hn::ShiftLeft<23>(hn::BitCast(di, n_and_magic));
  return hn::IfThenZeroElse(zero, hn::BitCast(df, hn::Add(hn::BitCast(di, p), power)));
}

float ExpSum(float* x, int64_t n, float max) {
  const DF df;
  const VF vmax = hn::Set(df, max);
  VF sum[4] = {hn::Zero(df), hn::Zero(df), hn::Zero(df), hn::Zero(df)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const VF e = Exp(hn::Sub(hn::LoadU(df, x + i + j * kLanes), vmax));
      hn::StoreU(e, df, x + i + j * kLanes);
      sum[j] = hn::Add(sum[j], e);
    }
  }
  for (; i < n; i += kLanes) {
    const int64_t left = n - i;
    VF e = Exp(hn::Sub(LoadFirst(x + i, left), vmax));
    if (left < kLanes) e = hn::IfThenElseZero(hn::FirstN(df, static_cast<size_t>(left)), e);
    StoreFirst(e, x + i, left);
    sum[0] = hn::Add(sum[0], e);
  }
  const VF total = hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
  return hn::GetLane(hn::SumOfLanes(df, total));
}

float Max(const float* x, int64_t n) {
  const DF df;
  VF max[2] = {hn::Set(df, -kInf), hn::Set(df, -kInf)};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    max[0] = hn::Max(max[0], hn::LoadU(df, x + i));
    max[1] = hn::Max(max[1], hn::LoadU(df, x + i + kLanes));
  }
  float result = hn::GetLane(hn::MaxOfLanes(df, hn::Max(max[0], max[1])));
  for (; i < n; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

// tanh(y) for y >= 0, to 3e-7 relative. The polynomial below 0.625 is that of Cephes' tanhf (S.
// Moshier); above, 1 - 2 / (exp(2 y) + 1) has no cancellation.
HWY_INLINE VF TanhOfPositive(VF y) {
  const DF df;
  const VF y2 = hn::Mul(y, y);
  VF p = hn::Set(df, -5.70498872745e-3f);
  p = hn::MulAdd(p, y2, hn::Set(df, 2.06390887954e-2f));
  p = hn::MulAdd(p, y2, hn::Set(df, -5.37397155531e-2f));
  p = hn::MulAdd(p, y2, hn::Set(df, 1.33314422036e-1f));
  p = hn::MulAdd(p, y2, hn::Set(df, -3.33332819422e-1f));
  const VF small = hn::MulAdd(hn::Mul(p, y2), y, y);
  const VF one = hn::Set(df, 1.0f);
  const VF e = Exp(hn::Min(hn::Add(y, y), hn::Set(df, 40.0f)));
  const VF large = hn::Sub(one, hn::Div(hn::Set(df, 2.0f), hn::Add(e, one)));
  return hn::IfThenElse(hn::Lt(y, hn::Set(df, 0.625f)), small, large);
}

void SoftCap(float* x, int64_t n, float cap) {
  const DF df;
  const VF vcap = hn::Set(df, cap), inverse = hn::Set(df, 1.0f / cap);
  for (int64_t i = 0; i < n; i += kLanes) {
    const VF v = LoadFirst(x + i, n - i);
    const VF capped = hn::Mul(vcap, TanhOfPositive(hn::Mul(hn::Abs(v), inverse)));
    StoreFirst(hn::CopySign(capped, v), x + i, n - i);
  }
}

void F16ToF32Array(const uint16_t* x, float* out, int64_t n) {
  const DF df;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) hn::StoreU(LoadF16(x + i), df, out + i);
  for (; i < n; ++i) out[i] = F16ToF32(x[i]);
}

void F32ToF16Array(const float* x, uint16_t* out, int64_t n) {
  const DF df;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) StoreF16(hn::LoadU(df, x + i), out + i);
  for (; i < n; ++i) out[i] = F32ToF16(x[i]);
}

HWY_INLINE bool IsBad(float x, float limit) { return !(x <= limit && x >= -limit); }

int64_t FindBad(const float* x, int64_t n, float limit) {
  const DF df;
  const VF vlimit = hn::Set(df, limit);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    // A NaN is not below the limit.
    if (!hn::AllTrue(df, hn::Le(hn::Abs(hn::LoadU(df, x + i)), vlimit))) break;
  }
  for (; i < n; ++i) {
    if (IsBad(x[i], limit)) return i;
  }
  return -1;
}

void AddVectorOpsTarget(KernelTable& table) {
  table.exp_sum = ExpSum;
  table.max = Max;
  table.soft_cap = SoftCap;
  table.f16_to_f32 = F16ToF32Array;
  table.f32_to_f16 = F32ToF16Array;
  table.find_bad = FindBad;
}

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace palu {
PALU_EXPORT_KERNELS(AddVectorOps)
}  // namespace palu
#endif
