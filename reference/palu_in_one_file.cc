// File: palu_in_one_file.cc - the whole method in plain C++: fit, encode, decode, attend.
//
//   g++ -std=c++20 -O2 reference/palu_in_one_file.cc -o palu_reference && ./palu_reference
//
// The first thing to read, and the oracle of the tests. It favours plain statements of the formulas
// over speed, uses nothing but the standard library and shares no code with src/. One sequence, one
// layer. Rows are [token][head][dim]; matrices are row-major vectors.
// Method: PALU (arXiv 2407.21118) as adapted by VeloxQuant-MLX, with later findings
// (docs/method.md).
#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace palu_reference {

using Vec = std::vector<double>;

struct Options {
  int rank = 0;                   // explicit rank; 0 = by energy
  double energy_threshold = 1.0;  // share of energy that the rank keeps
  bool energy_squares = false;    // energy = sum of sigma^2 instead of sum of sigma
  enum { kMin, kMax, kPerGroup } rank_policy = kMin;
  int head_groups = 4;
  bool average_positions = true;  // fit un-rotated keys, averaged over the context's positions
  bool rotate_mean = true;        // then the mean of un-rotated keys turns with the position
  int64_t context = 32768;
  int64_t fit_tokens = 512;  // the fit sees the first so many; until then all is exact. 0 = all
  bool quantize_values = true;
  bool auto_bits = true;  // bits by water-filling for `budget`; else hi_bit / lo_bit
  double budget = 4.0;    // codes + scales, bits per element
  int hi_bit = 4, lo_bit = 2;
  double hi_fraction = 0.25;
  bool log8 = true;  // 8-bit logarithmic scale and Lloyd-Max levels; else fp16 scale + zero
  int group_size = 32;
  int sink_tokens = 4, recent_tokens = 64;
  Vec distortion;  // [9] share of its variance that a channel loses at 0..8 bits; empty = by trying
};

struct Rope {
  bool halves = true;           // plane i = dims (i, i + n/2); else (2i, 2i + 1)
  std::vector<float> inv_freq;  // radians per position; empty = keys are not rotated
};

// ---- 1. Stored numbers: fp16, and a scale of 5 exponent and 3 mantissa bits ----

uint16_t ToHalf(double x) {  // round to nearest even
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double a = std::fabs(x);
  if (!(a < 65520)) return sign | 0x7c00;
  const int e = a == 0 ? -14 : std::max(-14, std::ilogb(a));
  return sign | static_cast<uint16_t>(((e + 14) << 10) + std::lrint(std::ldexp(a, 10 - e)));
}

double FromHalf(uint16_t h) {
  const int e = (h >> 10) & 31, m = h & 1023;
  const double a = e == 0 ? std::ldexp(m, -24) : std::ldexp(1024 + m, e - 25);
  return h & 0x8000 ? -a : a;
}

double RoundHalf(double x) { return FromHalf(ToHalf(x)); }

double Log8Value(int e) { return std::ldexp(8 + (e & 7), (e >> 3) - 19); }

int Log8From(double x) {  // nearest by ratio
  int e = 0;
  while (e < 255 && Log8Value(e) * Log8Value(e + 1) < x * x) ++e;
  return e;
}

// ---- 2. Codes of one channel within one token group ----

// log8: up to 4 bits the Lloyd-Max levels of a Gaussian (J. Max, 1960) as integers, times kUnit at
// rms 1; above, the uniform step of least error.
const std::vector<int> kLloydMax[5] = {
    {},
    {-64, 64},
    {-40, -12, 12, 40},
    {-88, -55, -31, -10, 10, 31, 55, 88},
    {-104, -79, -62, -48, -36, -25, -15, -5, 5, 15, 25, 36, 48, 62, 79, 104}};
constexpr double kUnit[9] = {0,          0.012466942, 0.037758745, 0.024446139, 0.026217138,
                             0.18813879, 0.10406301,  0.056867658, 0.030762399};

struct Scale {  // as stored: fp16 scale and zero, or the log8 byte in `scale`
  uint16_t scale = 0, zero = 0;
};

double ValueOf(int code, Scale s, const Options& o, int bits) {
  const double uniform = code - (1 << (bits - 1)) + 0.5;
  if (!o.log8) return FromHalf(s.scale) * uniform + FromHalf(s.zero);  // zero = the middle
  return Log8Value(s.scale) * kUnit[bits] * (bits <= 4 ? kLloydMax[bits][code] : uniform);
}

int NearestCode(double x, Scale s, const Options& o, int bits) {
  int low = 0, high = (1 << bits) - 1;
  while (low < high) {  // values grow with the code
    const int middle = (low + high) / 2;
    const double border = ValueOf(middle, s, o, bits) + ValueOf(middle + 1, s, o, bits);
    (2 * x > border ? low : high) = 2 * x > border ? middle + 1 : middle;
  }
  return low;
}

// log8: of the scales around that of the root mean square (1 and 2 bits) or around the one whose
// outermost level is the largest magnitude (3 to 8), the one of least squared error.
int FitLog8(const double* x, const Options& o, int bits) {
  constexpr int kFirst[9] = {0, -2, -2, -4, -2, -1, 0, 0, 0};
  constexpr int kLast[9] = {0, 1, 4, 1, 3, 3, 3, 3, 3};
  double squares = 0, largest = 0;
  for (int t = 0; t < o.group_size; ++t) {
    squares += x[t] * x[t];
    largest = std::max(largest, std::fabs(x[t]));
  }
  const Scale one{static_cast<uint16_t>(16 << 3)};  // 1.0
  const int middle = Log8From(bits <= 2 ? std::sqrt(squares / o.group_size)
                                        : largest / ValueOf((1 << bits) - 1, one, o, bits));
  int best = 0;
  double least = INFINITY;
  const int last = std::min(255, middle + kLast[bits]);
  for (int e = std::max(0, middle + kFirst[bits]); e <= last; ++e) {
    const Scale s{static_cast<uint16_t>(e)};
    double error = 0;
    for (int t = 0; t < o.group_size; ++t) {
      error += std::pow(ValueOf(NearestCode(x[t], s, o, bits), s, o, bits) - x[t], 2);
    }
    if (error < least) least = error, best = e;
  }
  return best;
}

Scale FitScale(const double* x, const Options& o, int bits) {
  if (o.log8) return {static_cast<uint16_t>(FitLog8(x, o, bits))};
  const auto [lo, hi] = std::minmax_element(x, x + o.group_size);
  return {ToHalf(std::max((*hi - *lo) / ((1 << bits) - 1), 1e-8)), ToHalf((*lo + *hi) / 2)};
}

// Share of its variance that a Gaussian channel loses at so many bits.
double Distortion(const Options& o, int bits) {
  if (!o.distortion.empty()) return o.distortion[bits];
  if (bits == 0) return 1;
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  const int rounds = (1 << 17) / o.group_size;
  double error = 0;
  Vec x(o.group_size);
  for (int round = 0; round < rounds; ++round) {
    const double size = std::exp2(static_cast<double>(round) / rounds);  // any, as scales are steps
    for (double& value : x) value = size * normal(random);
    const Scale s = FitScale(x.data(), o, bits);
    for (double v : x) {
      error += std::pow((ValueOf(NearestCode(v, s, o, bits), s, o, bits) - v) / size, 2);
    }
  }
  return error / (rounds * o.group_size);
}

// ---- 3. Moments, axes, rank ----

struct HeadRange {
  int first, last;
};

std::vector<HeadRange> HeadGroups(int heads, int groups) {
  groups = std::clamp(groups, 1, heads);
  std::vector<HeadRange> out;
  for (int g = 0, first = 0; g < groups; ++g) {
    const int n = heads / groups + (g < heads % groups ? 1 : 0);
    out.push_back({first, first + n});
    first += n;
  }
  return out;
}

// What RoPE does to one dim at position p: x_i cos(pw) - sign x_partner sin(pw).
struct Turn {
  int partner;
  double sign, w;
};

std::vector<Turn> Turns(const Rope& rope, int d) {
  std::vector<Turn> turns(d, {0, 0.0, 0.0});  // dims beyond the planes stay as they are
  const int n = static_cast<int>(rope.inv_freq.size());
  for (int i = 0; i < n; ++i) {
    const int a = rope.halves ? i : 2 * i, b = rope.halves ? i + n : 2 * i + 1;
    turns[a] = {b, 1, rope.inv_freq[i]};
    turns[b] = {a, -1, rope.inv_freq[i]};
  }
  return turns;
}

Vec Rotate(const Rope& rope, double position, const Vec& x) {
  Vec out = x;
  const std::vector<Turn> turns = Turns(rope, static_cast<int>(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    const auto [partner, sign, w] = turns[i];
    out[i] = x[i] * std::cos(position * w) - sign * x[partner] * std::sin(position * w);
  }
  return out;
}

struct Moments {  // sums over rows
  double rows = 0;
  Vec sum, outer;  // [D], [D][D]
};

void AddRow(Moments* m, const Vec& x) {
  m->rows += 1;
  for (size_t i = 0; i < x.size(); ++i) {
    m->sum[i] += x[i];
    for (size_t j = 0; j < x.size(); ++j) m->outer[i * x.size() + j] += x[i] * x[j];
  }
}

// Returns the mean and leaves the moments of x - mean.
Vec TakeMean(Moments* m) {
  Vec mean = std::exchange(m->sum, Vec(m->sum.size()));
  for (double& x : mean) x /= m->rows;
  const size_t d = mean.size();
  for (size_t i = 0; i < d * d; ++i) m->outer[i] -= m->rows * mean[i / d] * mean[i % d];
  return mean;
}

// Mean of e^(i p w) over p = 0 .. n-1.
std::complex<double> MeanPhase(double w, int64_t n) {
  const std::complex<double> step = std::polar(1.0, w);
  if (std::abs(step - 1.0) < 1e-12) return 1.0;
  return (std::polar(1.0, w * n) - 1.0) / (step - 1.0) / static_cast<double>(n);
}

// Moments of un-rotated keys -> the mean of the moments of R_p x over the positions p of [0, n).
// Products of two turns meet only cosines and sines of p (w_i - w_j) and p (w_i + w_j).
Moments AverageOverPositions(const Moments& m, const Rope& rope, int64_t n) {
  const int d = static_cast<int>(m.sum.size());
  const std::vector<Turn> turns = Turns(rope, d);
  Moments out = m;
  for (int i = 0; i < d; ++i) {
    const Turn& a = turns[i];
    const std::complex<double> one = MeanPhase(a.w, n);
    out.sum[i] = one.real() * m.sum[i] - a.sign * one.imag() * m.sum[a.partner];
    for (int j = 0; j < d; ++j) {
      const Turn& b = turns[j];
      const std::complex<double> minus = MeanPhase(a.w - b.w, n), plus = MeanPhase(a.w + b.w, n);
      out.outer[i * d + j] =  // the means of cos cos, cos sin, sin cos and sin sin
          m.outer[i * d + j] * (minus.real() + plus.real()) / 2 -
          b.sign * m.outer[i * d + b.partner] * (plus.imag() - minus.imag()) / 2 -
          a.sign * m.outer[a.partner * d + j] * (plus.imag() + minus.imag()) / 2 +
          a.sign * b.sign * m.outer[a.partner * d + b.partner] * (minus.real() - plus.real()) / 2;
    }
  }
  return out;
}

// Eigenvalues (descending) and eigenvectors (columns of v) of a symmetric matrix, by cyclic Jacobi
// rotations. The largest entry of each column is made positive, so that the result is unique.
void Eigen(Vec a, int d, Vec* lambda, Vec* v) {
  Vec e(d * d, 0.0);
  for (int i = 0; i < d; ++i) e[i * d + i] = 1;
  for (int sweep = 0; sweep < 60; ++sweep) {
    double off = 0, diag = 0;
    for (int i = 0; i < d * d; ++i) (i / d == i % d ? diag : off) += a[i] * a[i];
    if (off <= 1e-30 * diag) break;
    for (int p = 0; p < d; ++p) {
      for (int q = p + 1; q < d; ++q) {
        if (a[p * d + q] == 0) continue;
        const double theta = (a[q * d + q] - a[p * d + p]) / (2 * a[p * d + q]);
        const double t = (theta < 0 ? -1 : 1) / (std::fabs(theta) + std::hypot(theta, 1.0));
        const double c = 1 / std::hypot(t, 1.0), s = t * c;
        const auto turn = [c, s](double& x, double& y) {
          const double old = x;
          x = c * x - s * y;
          y = s * old + c * y;
        };
        for (int i = 0; i < d; ++i) turn(a[i * d + p], a[i * d + q]);
        for (int i = 0; i < d; ++i) turn(a[p * d + i], a[q * d + i]);
        for (int i = 0; i < d; ++i) turn(e[i * d + p], e[i * d + q]);
      }
    }
  }
  std::vector<int> order(d);
  for (int i = 0; i < d; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](int x, int y) { return a[x * d + x] > a[y * d + y]; });
  lambda->resize(d);
  v->resize(d * d);
  for (int c = 0; c < d; ++c) {
    const int from = order[c];
    (*lambda)[c] = std::max(0.0, a[from * d + from]);
    int top = 0;
    for (int i = 1; i < d; ++i) {
      if (std::fabs(e[i * d + from]) > std::fabs(e[top * d + from])) top = i;
    }
    const double sign = e[top * d + from] < 0 ? -1 : 1;
    for (int i = 0; i < d; ++i) (*v)[i * d + c] = sign * e[i * d + from];
  }
}

// Smallest r whose share of the energy reaches the threshold.
int RankFor(const Vec& sigma, double threshold, bool squares) {
  double total = 0, sum = 0;
  for (double s : sigma) total += squares ? s * s : s;
  if (total < 1e-12) return 1;
  for (size_t r = 1; r <= sigma.size(); ++r) {
    sum += squares ? sigma[r - 1] * sigma[r - 1] : sigma[r - 1];
    if (sum >= threshold * total) return static_cast<int>(r);
  }
  return static_cast<int>(sigma.size());
}

struct Basis {            // of one head group
  Vec mu, v, sigma;       // [D], [D][rank], [D]; v is kept as fp16, mu as fp32
  std::vector<int> bits;  // [rank]; 16 = fp16 latents
  Rope rope;              // that turns mu; empty = mu is the same everywhere
};

// ---- 4. Bits ----

std::vector<int> MixedBits(int rank, const Options& o) {
  const int hi = std::min(rank, std::max(1, static_cast<int>(std::floor(rank * o.hi_fraction))));
  std::vector<int> bits(rank, o.lo_bit);
  std::fill_n(bits.begin(), hi, o.hi_bit);
  return bits;
}

// Reverse water-filling over the channels of all groups, four neighbours at a time: starting from
// nothing, take the step that saves most error per stored bit, as long as one fits the budget.
// Channels left at 0 are dropped.
void WaterFill(const std::vector<HeadRange>& groups, const Options& o, std::vector<Basis>* bases) {
  double distortion[9], cost[9];
  for (int b = 0; b <= 8; ++b) {
    distortion[b] = Distortion(o, b);
    cost[b] = b == 0 ? 0 : 4 * (b + (o.log8 ? 8.0 : 32.0) / o.group_size);
  }
  for (Basis& b : *bases) std::fill(b.bits.begin(), b.bits.end(), 0);
  double left = o.budget * bases->front().mu.size() * groups.back().last + 1e-9;
  for (;;) {
    double best_gain = 0, best_cost = 0;
    int best_bits = 0, best_group = 0;
    size_t best = 0;
    for (size_t g = 0; g < groups.size(); ++g) {
      const int heads = groups[g].last - groups[g].first;
      const Basis& basis = (*bases)[g];
      for (size_t c = 0; c < basis.bits.size(); c += 4) {
        double energy = 0;  // over all heads
        for (size_t i = c; i < std::min(c + 4, basis.bits.size()); ++i) {
          energy += basis.sigma[i] * basis.sigma[i];
        }
        const int now = basis.bits[c];
        for (int next = now + 1; next <= 8; ++next) {
          const double more = heads * (cost[next] - cost[now]);
          const double error = energy * (distortion[now] - distortion[next]);
          if (more <= left && error / more > best_gain) {
            best = c, best_group = static_cast<int>(g), best_bits = next;
            best_cost = more, best_gain = error / more;
          }
        }
      }
    }
    if (best_gain == 0) break;
    std::vector<int>& bits = (*bases)[best_group].bits;
    for (size_t i = best; i < std::min(best + 4, bits.size()); ++i) bits[i] = best_bits;
    left -= best_cost;
  }
  for (Basis& b : *bases) {  // a group keeps at least four channels
    if (std::count(b.bits.begin(), b.bits.end(), 0) == std::ssize(b.bits)) {
      std::fill_n(b.bits.begin(), std::min<size_t>(4, b.bits.size()), 2);
    }
  }
}

// ---- 5. The basis of each head group ----

// Tokens that have to be there before anything is encoded: one token alone has no spread.
int64_t FitTokens(const Options& o) { return std::max<int64_t>(o.fit_tokens, o.sink_tokens + 2); }

// Fitted on the tokens before fit_tokens (0 = all) but the sinks, which stay exact and are unlike
// all other tokens. x: [tokens][heads][d].
std::vector<Basis> Fit(const std::vector<float>& x, const std::vector<HeadRange>& groups, int d,
                       const Options& o, bool quantize, const Rope* rope) {
  const int heads = groups.back().last;
  const int64_t tokens = static_cast<int64_t>(x.size()) / heads / d;
  const int64_t end = o.fit_tokens > 0 ? FitTokens(o) : tokens;
  if (!o.average_positions) rope = nullptr;
  const bool turns = rope != nullptr && o.rotate_mean;
  std::vector<Basis> bases;
  std::vector<int> ranks;
  for (const HeadRange& group : groups) {
    Moments m{0, Vec(d), Vec(d * d)};
    Vec row(d), lambda;
    for (int64_t t = o.sink_tokens; t < end; ++t) {
      for (int h = group.first; h < group.last; ++h) {
        for (int i = 0; i < d; ++i) row[i] = RoundHalf(x[(t * heads + h) * d + i]);
        AddRow(&m, rope != nullptr ? Rotate(*rope, -static_cast<double>(t), row) : row);
      }
    }
    Basis b;
    // A mean that turns goes before RoPE makes variance of it, one that stands still after.
    if (turns) b.rope = *rope, b.mu = TakeMean(&m);
    if (rope != nullptr) m = AverageOverPositions(m, *rope, o.context);
    if (!turns) b.mu = TakeMean(&m);
    Eigen(m.outer, d, &lambda, &b.v);
    for (double l : lambda) b.sigma.push_back(std::sqrt(l));
    ranks.push_back(o.rank > 0 ? o.rank : RankFor(b.sigma, o.energy_threshold, o.energy_squares));
    bases.push_back(b);
  }
  for (size_t g = 0; g < bases.size(); ++g) {
    const int rank = o.rank_policy == Options::kMin ? *std::min_element(ranks.begin(), ranks.end())
                     : o.rank_policy == Options::kMax
                         ? *std::max_element(ranks.begin(), ranks.end())
                         : ranks[g];
    bases[g].bits = quantize ? MixedBits(rank, o) : std::vector<int>(rank, 16);
  }
  if (quantize && o.auto_bits) WaterFill(groups, o, &bases);
  for (Basis& b : bases) {  // keep the columns that have bits
    const Vec all = std::exchange(b.v, {});
    for (int i = 0; i < d; ++i) {
      for (size_t c = 0; c < b.bits.size(); ++c) {
        if (b.bits[c] > 0) b.v.push_back(RoundHalf(all[i * d + c]));
      }
      b.mu[i] = static_cast<float>(b.mu[i]);
    }
    std::erase(b.bits, 0);
  }
  return bases;
}

// ---- 6. Pages: the latents of one head and one side, max(32, group_size) tokens ----
//
// Channels are sorted by bits, most first, and cut into quads of four with equal bits; slots that
// stay empty hold zeros. codes[block of 32 tokens][quad], 16 * bits bytes each, then the scales of
// each token group: one byte per slot (log8), or fp16 scales, then fp16 zeros (min/max). The 128
// codes of a quad and block are put in order, token t of lane l at 4 t + l in keys and at
// 16 (t / 4) + 4 l + t mod 4 in values, and cut into planes of 8, 4, 2 and 1 bits, the lowest bits
// first: in a plane of p bits code j sits in byte j mod 16 p at bit p * (j / 16 p). Channels of 16
// bits hold 32 fp16 numbers and have no scale.

int PageTokens(const Options& o) { return std::max(32, o.group_size); }

struct Slots {
  std::vector<int> channel;    // [slot], -1 = empty
  std::vector<int> offset;     // [slot / 4], bytes into a block
  std::vector<int> slot_bits;  // [slot / 4]
  int block_bytes = 0;
};

Slots SlotsOf(const std::vector<int>& bits) {
  Slots slots;
  for (int b = 8; b >= 1; --b) {
    for (size_t c = 0; c < bits.size(); ++c) {
      if (bits[c] == b) slots.channel.push_back(static_cast<int>(c));
    }
    while (slots.channel.size() % 4 != 0) slots.channel.push_back(-1);
    while (slots.offset.size() < slots.channel.size() / 4) {
      slots.offset.push_back(slots.block_bytes);
      slots.slot_bits.push_back(b);
      slots.block_bytes += 16 * b;
    }
  }
  return slots;
}

int CodeAt(int lane, int token, bool values) {
  return values ? token / 4 * 16 + lane * 4 + token % 4 : 4 * token + lane;
}

void PutCode(uint8_t* quad, int bits, int j, int code) {
  for (int p : {8, 4, 2, 1}) {
    if (!(bits & p)) continue;
    quad[j % (16 * p)] |= (code & ((1 << p) - 1)) << (p * (j / (16 * p)));
    code >>= p;
    quad += 16 * p;
  }
}

int GetCode(const uint8_t* quad, int bits, int j) {
  int code = 0, shift = 0;
  for (int p : {8, 4, 2, 1}) {
    if (!(bits & p)) continue;
    code |= ((quad[j % (16 * p)] >> (p * (j / (16 * p)))) & ((1 << p) - 1)) << shift;
    shift += p;
    quad += 16 * p;
  }
  return code;
}

struct Page {  // of one head; stored one after the other: codes, scales, zeros
  std::vector<uint8_t> codes;
  std::vector<uint16_t> raw;            // [token][channel] fp16, if the channels have 16 bits
  std::vector<uint16_t> scales, zeros;  // [token group][slot]; log8: bytes, and no zeros
};

int64_t PageBytes(const Page& page, const Options& o) {
  return page.codes.size() + 2 * page.raw.size() + page.scales.size() * (o.log8 ? 1 : 2) +
         page.zeros.size() * 2;
}

// x: [channel][token]
Page EncodePage(const Vec& x, const std::vector<int>& bits, const Options& o, bool values) {
  const int tokens = PageTokens(o), rank = static_cast<int>(bits.size());
  Page page;
  if (rank > 0 && bits[0] == 16) {
    for (int t = 0; t < tokens; ++t) {
      for (int c = 0; c < rank; ++c) page.raw.push_back(ToHalf(x[c * tokens + t]));
    }
    return page;
  }
  const Slots slots = SlotsOf(bits);
  page.codes.resize(slots.block_bytes * tokens / 32);
  for (int t0 = 0; t0 < tokens; t0 += o.group_size) {
    for (size_t s = 0; s < slots.channel.size(); ++s) {
      const int c = slots.channel[s], b = slots.slot_bits[s / 4];
      const Scale scale = c < 0 ? Scale{} : FitScale(&x[c * tokens + t0], o, b);
      page.scales.push_back(scale.scale);
      if (!o.log8) page.zeros.push_back(scale.zero);
      for (int t = t0; t < t0 + o.group_size && c >= 0; ++t) {
        PutCode(&page.codes[t / 32 * slots.block_bytes + slots.offset[s / 4]], b,
                CodeAt(s % 4, t % 32, values), NearestCode(x[c * tokens + t], scale, o, b));
      }
    }
  }
  return page;
}

Vec DecodePage(const Page& page, const std::vector<int>& bits, const Options& o, bool values) {
  const int tokens = PageTokens(o), rank = static_cast<int>(bits.size());
  const Slots slots = SlotsOf(bits);
  Vec x(rank * tokens);
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < rank && !page.raw.empty(); ++c) {
      x[c * tokens + t] = FromHalf(page.raw[t * rank + c]);
    }
    for (size_t s = 0; s < slots.channel.size(); ++s) {
      const int c = slots.channel[s], b = slots.slot_bits[s / 4];
      if (c < 0) continue;
      const int code = GetCode(&page.codes[t / 32 * slots.block_bytes + slots.offset[s / 4]], b,
                               CodeAt(s % 4, t % 32, values));
      const size_t at = t / o.group_size * slots.channel.size() + s;
      const Scale scale = {page.scales[at], o.log8 ? uint16_t{0} : page.zeros[at]};
      x[c * tokens + t] = ValueOf(code, scale, o, b);
    }
  }
  return x;
}

// ---- 7. One side (K or V) of one layer: encode, decode, attend ----

struct Side {
  int heads = 0, dim = 0;
  bool values = false;
  int64_t tokens = 0, encoded = 0;
  std::vector<HeadRange> groups;
  std::vector<Basis> bases;              // per head group
  std::vector<std::vector<Page>> pages;  // [head]
  std::vector<uint16_t> exact;  // fp16 [token][head][dim]: the sinks, then what follows the pages
};

int GroupOf(const Side& side, int head) {
  int g = 0;
  while (head >= side.groups[g].last) ++g;
  return g;
}

// x: [tokens][heads][dim] in all, as the result does not depend on how the tokens came. Keys pass
// their rope (null = do not un-rotate). Nothing is encoded before fit_tokens are there.
Side Encode(const std::vector<float>& x, int heads, int dim, const Options& o, bool quantize,
            const Rope* rope, bool values) {
  Side side{heads,  dim,
            values, static_cast<int64_t>(x.size()) / heads / dim,
            0,      HeadGroups(heads, o.head_groups),
            {},     {},
            {}};
  side.pages.resize(heads);
  const int page = PageTokens(o);
  if (side.tokens >= FitTokens(o)) {
    side.bases = Fit(x, side.groups, dim, o, quantize, rope);
    side.encoded =
        std::max<int64_t>(0, side.tokens - o.sink_tokens - o.recent_tokens) / page * page;
  }
  for (int64_t t = 0; t < side.tokens; ++t) {
    if (t >= o.sink_tokens && t < o.sink_tokens + side.encoded) continue;
    for (int i = 0; i < heads * dim; ++i) side.exact.push_back(ToHalf(x[t * heads * dim + i]));
  }
  for (int64_t first = 0; first < side.encoded; first += page) {
    for (int h = 0; h < heads; ++h) {
      const Basis& b = side.bases[GroupOf(side, h)];
      const int rank = static_cast<int>(b.bits.size());
      Vec latents(rank * page, 0.0);
      for (int t = 0; t < page; ++t) {
        const int64_t position = o.sink_tokens + first + t;
        const float* row = &x[(position * heads + h) * dim];
        const Vec mu = Rotate(b.rope, position, b.mu);
        for (int i = 0; i < dim; ++i) {
          const double centred = RoundHalf(row[i]) - mu[i];
          for (int c = 0; c < rank; ++c) latents[c * page + t] += centred * b.v[i * rank + c];
        }
      }
      side.pages[h].push_back(EncodePage(latents, b.bits, o, side.values));
    }
  }
  return side;
}

// x = R_p mu + V latent for tokens in pages, as stored for the others: [head][token][dim].
Vec Decode(const Side& side, const Options& o) {
  const int d = side.dim, page = PageTokens(o);
  Vec out(side.heads * side.tokens * d);
  for (int h = 0; h < side.heads; ++h) {
    double* rows = &out[h * side.tokens * d];
    for (int64_t slot = 0; slot < side.tokens - side.encoded; ++slot) {
      double* row = rows + (slot < o.sink_tokens ? slot : slot + side.encoded) * d;
      for (int i = 0; i < d; ++i) row[i] = FromHalf(side.exact[(slot * side.heads + h) * d + i]);
    }
    for (size_t p = 0; p < side.pages[h].size(); ++p) {
      const Basis& b = side.bases[GroupOf(side, h)];
      const int rank = static_cast<int>(b.bits.size());
      const Vec latents = DecodePage(side.pages[h][p], b.bits, o, side.values);
      for (int t = 0; t < page; ++t) {
        const int64_t position = o.sink_tokens + p * page + t;
        double* row = rows + position * d;
        const Vec mu = Rotate(b.rope, position, b.mu);
        for (int i = 0; i < d; ++i) {
          row[i] = mu[i];
          for (int c = 0; c < rank; ++c) row[i] += latents[c * page + t] * b.v[i * rank + c];
        }
      }
    }
  }
  return out;
}

struct AttendOptions {
  double scale = 0, soft_cap = 0;  // scale 0 = 1 / sqrt(dim); soft_cap 0 = none
  const float* sinks = nullptr;    // [q_heads] logits without a value
  const float* mask = nullptr;     // [n][tokens], added to the logits
  bool causal = true;
};

// q: [q_heads][n][dim], the queries of the last n tokens -> [q_heads][n][dim of v].
Vec Attend(const std::vector<float>& q, int q_heads, int64_t n, const Side& k, const Side& v,
           const Options& o, const AttendOptions& a = {}) {
  const Vec keys = Decode(k, o), values = Decode(v, o);
  const double scale = a.scale != 0 ? a.scale : 1 / std::sqrt(static_cast<double>(k.dim));
  Vec out(q_heads * n * v.dim), p(k.tokens);
  for (int64_t row = 0; row < q_heads * n; ++row) {
    const int64_t h = row / n, i = row % n, first = h / (q_heads / k.heads) * k.tokens;
    double top = a.sinks != nullptr ? a.sinks[h] : -INFINITY, sum = 0;
    for (int64_t t = 0; t < k.tokens; ++t) {
      double s = 0;
      for (int c = 0; c < k.dim; ++c) s += q[row * k.dim + c] * keys[(first + t) * k.dim + c];
      s *= scale;
      if (a.soft_cap != 0) s = a.soft_cap * std::tanh(s / a.soft_cap);
      if (a.mask != nullptr) s += a.mask[i * k.tokens + t];
      p[t] = a.causal && t > k.tokens - n + i ? -INFINITY : s;
      top = std::max(top, p[t]);
    }
    for (double& x : p) sum += x = std::exp(x - top);
    if (a.sinks != nullptr) sum += std::exp(a.sinks[h] - top);
    for (int64_t t = 0; t < k.tokens; ++t) {
      for (int c = 0; c < v.dim; ++c) {
        out[row * v.dim + c] += p[t] / sum * values[(first + t) * v.dim + c];
      }
    }
  }
  return out;
}

int64_t PageBytes(const Side& side, const Options& o) {
  int64_t sum = 0;
  for (const auto& head : side.pages) {
    for (const Page& page : head) sum += PageBytes(page, o);
  }
  return sum;
}

int64_t BasisBytes(const Side& side) {  // V in fp16, mu in fp32
  int64_t sum = 0;
  for (const Basis& b : side.bases) sum += static_cast<int64_t>(4 * b.mu.size() + 2 * b.v.size());
  return sum;
}

}  // namespace palu_reference

#ifndef PALU_REFERENCE_NO_MAIN
// Keys and values with a decaying spectrum, keys with a mean and rotated: what bits cost and lose.
int main() {
  using namespace palu_reference;
  const int heads = 4, d = 64, tokens = 1100;
  Rope rope;
  for (int i = 0; i < d / 2; ++i) rope.inv_freq.push_back(std::pow(10000.0f, -2.0f * i / d));
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  Vec mix(d * d), mean(d);
  for (double& x : mix) x = normal(random) / std::sqrt(d);
  for (double& x : mean) x = normal(random);
  const auto rows = [&](bool key, int64_t first, int64_t last) {
    std::vector<float> out;
    for (int64_t i = first * heads; i < last * heads; ++i) {
      Vec x = key ? mean : Vec(d, 0.0);
      for (int c = 0; c < d; ++c) {
        const double latent = normal(random) * 1.5 * std::exp(-0.08 * c);
        for (int j = 0; j < d; ++j) x[j] += latent * mix[c * d + j];
      }
      if (key) x = Rotate(rope, i / heads, x);
      out.insert(out.end(), x.begin(), x.end());
    }
    return out;
  };
  const std::vector<float> k = rows(true, 0, tokens), v = rows(false, 0, tokens);
  const std::vector<float> q = rows(true, tokens - 1, tokens);
  const auto distance = [](const Vec& a, const Vec& b) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < a.size(); ++i) error += std::pow(a[i] - b[i], 2), norm += b[i] * b[i];
    return std::sqrt(error / norm);
  };
  Options exact;
  exact.fit_tokens = tokens + 1;
  const Side k0 = Encode(k, heads, d, exact, true, &rope, false),
             v0 = Encode(v, heads, d, exact, true, nullptr, true);
  std::printf("%d heads, D %d, %d tokens, %zu bytes as fp16\n", heads, d, tokens, 4 * k.size());
  std::printf("%-21s %8s %8s %8s %7s %7s %7s\n", "", "pages", "bases", "exact", "K err", "V err",
              "out err");
  for (const int budget : {2, 3, 4, 6, 0}) {
    Options o;
    o.budget = budget;
    if (budget == 0) {  // the recipe of the reference
      o.energy_threshold = 0.9, o.fit_tokens = tokens, o.average_positions = false;
      o.auto_bits = o.log8 = false, o.sink_tokens = o.recent_tokens = 0;
    }
    const Side ke = Encode(k, heads, d, o, true, &rope, false),
               ve = Encode(v, heads, d, o, true, nullptr, true);
    std::printf(
        "%-21s %8lld %8lld %8zu %7.4f %7.4f %7.4f\n",
        budget == 0 ? "reference recipe" : (std::to_string(budget) + " bits per element").c_str(),
        static_cast<long long>(PageBytes(ke, o) + PageBytes(ve, o)),
        static_cast<long long>(BasisBytes(ke) + BasisBytes(ve)),
        2 * (ke.exact.size() + ve.exact.size()), distance(Decode(ke, o), Decode(k0, exact)),
        distance(Decode(ve, o), Decode(v0, exact)),
        distance(Attend(q, heads, 1, ke, ve, o), Attend(q, heads, 1, k0, v0, exact)));
  }
}
#endif
