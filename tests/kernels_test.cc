// Every kernel of every table that this CPU runs, against the reference and against plain
// arithmetic.
//
// Buffers have exactly the promised sizes (a page plus kReadPadding; matrices without any slack),
// so that a build with AddressSanitizer also checks the reads.
#include "kernels/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/fp16.h"
#include "codec/page_plan.h"
#include "palu/errors.h"

namespace palu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

class Kernels : public testing::TestWithParam<const KernelTable*> {
 protected:
  const KernelTable& kernels() const { return *GetParam(); }

  int Uniform(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  std::vector<float> Normal(size_t n, float sigma = 1.0f) {
    std::normal_distribution<float> normal(0.0f, sigma);
    std::vector<float> x(n);
    for (float& v : x) v = normal(random_);
    return x;
  }

  std::mt19937 random_{12345};
};

INSTANTIATE_TEST_SUITE_P(All, Kernels, testing::ValuesIn(AllKernels()),
                         [](const auto& info) { return std::string(info.param->name); });

// A run of pages with the memory they lie in.
struct Pages {
  PagePlan plan;
  std::vector<std::vector<uint8_t>> buffers;
  std::vector<const uint8_t*> pointers;

  PageRun run() const { return {&plan, pointers.data(), static_cast<int>(pointers.size())}; }
  int tokens() const { return static_cast<int>(pointers.size()) * plan.page_tokens; }
};

// Encodes x ([channel][token of the run]) with the reference; pages start at odd multiples of 4
// bytes.
Pages MakePages(const PagePlan& plan, const std::vector<float>& x, int n_pages) {
  Pages pages{plan, {}, {}};
  const int64_t stride = static_cast<int64_t>(n_pages) * plan.page_tokens;
  for (int p = 0; p < n_pages; ++p) {
    const size_t offset = 4 * static_cast<size_t>(p % 3);
    pages.buffers.emplace_back(offset + plan.page_bytes() + kReadPadding, 0xff);
    uint8_t* page = pages.buffers.back().data() + offset;
    Reference().encode_page(plan, x.data() + p * plan.page_tokens, stride, page);
    pages.pointers.push_back(page);
  }
  return pages;
}

// What a random page side looks like.
struct Shape {
  PagePlan plan;
  int n_pages, rows;

  std::string Describe() const {
    std::string text = "rank " + std::to_string(plan.rank) + " group " +
                       std::to_string(plan.group_size) + " scales " +
                       std::to_string(static_cast<int>(plan.scales)) + " pages " +
                       std::to_string(n_pages) + " rows " + std::to_string(rows) + " bits";
    for (const uint8_t b : plan.bits) text.append(" ").append(std::to_string(b));
    return text;
  }
};

class PageKernels : public Kernels {
 protected:
  Shape RandomShape() {
    const int rank = Uniform(0, 3) == 0 ? 16 * Uniform(1, 8) : Uniform(1, 130);
    std::vector<uint8_t> bits(rank);
    const int kind = Uniform(0, 5);
    for (int c = 0; c < rank; ++c) {
      if (kind == 0) bits[c] = 16;
      if (kind == 1) bits[c] = 32;
      if (kind == 2) bits[c] = static_cast<uint8_t>(Uniform(1, 8));  // in any order
      if (kind == 3) bits[c] = static_cast<uint8_t>(8 - 8 * c / rank);
      if (kind == 4) bits[c] = c < rank / 4 + 1 ? 4 : 2;
      if (kind == 5) bits[c] = static_cast<uint8_t>(1 + rank % 8);
    }
    const int groups[] = {8, 16, 32, 64, 128};
    const ScaleFormat scales = static_cast<ScaleFormat>(Uniform(0, 4));
    const bool per_token = scales != ScaleFormat::kMinMax && scales != ScaleFormat::kLog8;
    // The methods that scale tokens give all channels the same bits.
    if (per_token && kind > 1) std::fill(bits.begin(), bits.end(), bits[0]);
    // Raw and token-scaled pages may be longer than a block: K and V of a head share their page
    // length.
    const int page_tokens = kind <= 1 || per_token ? kBlockTokens * Uniform(1, 4) : 0;
    const CodeOrder order = Uniform(0, 1) ? CodeOrder::kForSums : CodeOrder::kForScores;
    return {PagePlan::Make(bits, scales, groups[Uniform(0, 4)], page_tokens, order), Uniform(1, 9),
            Uniform(1, kMaxFusedRows)};
  }

  // Latents whose channels differ in size and mean, some constant, some zero.
  std::vector<float> RandomLatents(const Shape& shape) {
    const int tokens = shape.n_pages * shape.plan.page_tokens;
    std::vector<float> x = Normal(static_cast<size_t>(shape.plan.rank) * tokens);
    for (int c = 0; c < shape.plan.rank; ++c) {
      float* channel = x.data() + static_cast<int64_t>(c) * tokens;
      const float sizes[] = {1e-8f, 1e-3f, 0.3f, 1.0f, 20.0f, 1e4f, 0.0f};
      const float size = sizes[Uniform(0, 6)];
      const float mean = Uniform(0, 2) == 0 ? (Uniform(0, 9) == 0 ? 6e4f : 2.0f * size) : 0.0f;
      for (int t = 0; t < tokens; ++t) channel[t] = channel[t] * size + mean;
    }
    return x;
  }

  // All values of the run, [channel][token], by the reference.
  std::vector<float> Values(const Pages& pages) {
    const PagePlan& plan = pages.plan;
    std::vector<float> values(static_cast<size_t>(plan.rank) * pages.tokens());
    std::vector<float> block(static_cast<size_t>(plan.rank) * kBlockTokens);
    for (size_t p = 0; p < pages.pointers.size(); ++p) {
      for (int b = 0; b < plan.blocks(); ++b) {
        Reference().decode_block(plan, pages.pointers[p], b, block.data());
        for (int c = 0; c < plan.rank; ++c) {
          std::copy_n(&block[c * kBlockTokens], kBlockTokens,
                      &values[static_cast<size_t>(c) * pages.tokens() + p * plan.page_tokens +
                              b * kBlockTokens]);
        }
      }
    }
    return values;
  }
};

INSTANTIATE_TEST_SUITE_P(All, PageKernels, testing::ValuesIn(AllKernels()),
                         [](const auto& info) { return std::string(info.param->name); });

float LargestMagnitude(const float* x, int64_t n) {
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  return largest;
}

// Size of one level of a slot in the only token group of a page, from the stored scale.
float LevelSize(const PagePlan& plan, const uint8_t* page, int slot) {
  const uint8_t* const scales = page + plan.code_bytes();
  if (plan.scales == ScaleFormat::kLog8) return Log8Value(scales[slot]) * plan.unit[slot];
  uint16_t half;
  std::memcpy(&half, scales + 2 * slot, 2);
  return F16ToF32(half);
}

// How far rounding products of a query to integers moves its scores against a page, as score.cc
// states it; nothing where products are not rounded.
double RoundingOfScores(const PagePlan& plan, const uint8_t* page, const float* q, bool fast) {
  if (plan.raw || plan.groups() > 1 || plan.token_scaled()) return 0;
  double largest = 0, levels = 0;
  for (int s = 0; s < plan.slots; ++s) {
    if (plan.channel[s] < 0) continue;
    largest = std::max(
        largest, std::fabs(static_cast<double>(q[plan.channel[s]]) * LevelSize(plan, page, s)));
    levels += plan.mid[s];
  }
  return 0.501 * largest * levels / (fast ? 127 : plan.most_query);
}

// [rows][tokens + 3], the last three untouched.
std::vector<float> RunScore(const KernelTable& kernels, const Pages& pages,
                            const std::vector<float>& q, int64_t q_stride, int rows,
                            bool fast = false) {
  const int64_t out_stride = pages.tokens() + 3;
  std::vector<float> out(static_cast<size_t>(rows * out_stride), 99.0f);
  std::vector<float> scratch(ScoreScratch(pages.plan, rows));
  kernels.score({.run = pages.run(),
                 .q = q.data(),
                 .q_stride = q_stride,
                 .rows = rows,
                 .out = out.data(),
                 .out_stride = out_stride,
                 .fast = fast,
                 .scratch = scratch.data()});
  return out;
}

TEST_P(PageKernels, ScoreIsTheDotProductWithTheDecodedLatents) {
  for (int trial = 0; trial < 120; ++trial) {
    const Shape shape = RandomShape();
    const bool fast = trial % 3 == 0;
    SCOPED_TRACE(shape.Describe() + (fast ? " fast" : ""));
    const Pages pages = MakePages(shape.plan, RandomLatents(shape), shape.n_pages);
    const std::vector<float> values = Values(pages);
    const int rank = shape.plan.rank, tokens = pages.tokens();
    // The last row of q ends with its last channel.
    const int64_t q_stride = rank + Uniform(0, 5);
    const std::vector<float> q = Normal(static_cast<size_t>((shape.rows - 1) * q_stride + rank));
    const std::vector<float> out = RunScore(kernels(), pages, q, q_stride, shape.rows, fast);
    for (int i = 0; i < shape.rows; ++i) {
      double bound = 1e-30;  // rounding of a * level and z of each channel
      for (int c = 0; c < rank; ++c) {
        bound += 2e-6 * std::fabs(q[i * q_stride + c]) *
                 LargestMagnitude(&values[static_cast<size_t>(c) * tokens], tokens);
      }
      for (int t = 0; t < tokens; ++t) {
        double expected = 0;
        for (int c = 0; c < rank; ++c) {
          expected += static_cast<double>(q[i * q_stride + c]) * values[c * tokens + t];
        }
        const uint8_t* const page = pages.pointers[static_cast<size_t>(t / shape.plan.page_tokens)];
        const double rounding = RoundingOfScores(shape.plan, page, &q[i * q_stride], fast);
        ASSERT_NEAR(out[i * (tokens + 3) + t], expected, bound + rounding)
            << "row " << i << " token " << t;
      }
      for (int t = tokens; t < tokens + 3; ++t) ASSERT_EQ(out[i * (tokens + 3) + t], 99.0f);
    }
  }
}

TEST_P(PageKernels, ScoresOfARowDoNotDependOnTheOtherRowsOrPages) {
  for (int trial = 0; trial < 20; ++trial) {
    Shape shape = RandomShape();
    shape.rows = kMaxFusedRows;
    shape.n_pages = 3;
    SCOPED_TRACE(shape.Describe());
    const Pages pages = MakePages(shape.plan, RandomLatents(shape), shape.n_pages);
    const int rank = shape.plan.rank, tokens = pages.tokens();
    const std::vector<float> q = Normal(static_cast<size_t>(shape.rows * rank));
    const std::vector<float> all = RunScore(kernels(), pages, q, rank, shape.rows);
    Pages last = MakePages(shape.plan, {}, 0);
    last.pointers = {pages.pointers[2]};
    for (int i = 0; i < shape.rows; ++i) {
      const std::vector<float> row(q.begin() + i * rank, q.begin() + (i + 1) * rank);
      const std::vector<float> one = RunScore(kernels(), last, row, rank, 1);
      for (int t = 0; t < shape.plan.page_tokens; ++t) {
        ASSERT_EQ(one[t], all[i * (tokens + 3) + 2 * shape.plan.page_tokens + t]);
      }
    }
  }
}

TEST_P(PageKernels, AccumulateAddsTheWeightedSumOfTheDecodedLatents) {
  for (int trial = 0; trial < 120; ++trial) {
    const Shape shape = RandomShape();
    const bool fast = trial % 3 == 0;
    SCOPED_TRACE(shape.Describe() + (fast ? " fast" : ""));
    const Pages pages = MakePages(shape.plan, RandomLatents(shape), shape.n_pages);
    const std::vector<float> values = Values(pages);
    const int rank = shape.plan.rank, rows = shape.rows, tokens = pages.tokens();
    const int64_t p_stride = tokens + Uniform(0, 5), acc_stride = rank + Uniform(0, 5);
    std::vector<float> p = Normal(static_cast<size_t>((rows - 1) * p_stride + tokens));
    for (float& weight : p) weight = std::fabs(weight);
    const std::vector<float> before = Normal(static_cast<size_t>((rows - 1) * acc_stride + rank));
    std::vector<float> acc = before;
    std::vector<float> scratch(AccumulateScratch(shape.plan, rows));
    kernels().accumulate({.run = pages.run(),
                          .p = p.data(),
                          .p_stride = p_stride,
                          .rows = rows,
                          .acc = acc.data(),
                          .acc_stride = acc_stride,
                          .fast = fast,
                          .scratch = scratch.data()});
    for (int i = 0; i < rows; ++i) {
      double weights = 0, rounding = 0;
      for (int t = 0; t < tokens; ++t) weights += p[i * p_stride + t];
      for (int t = 0; t < tokens && !shape.plan.raw; t += kBlockTokens) {
        rounding += 0.501 * LargestMagnitude(&p[i * p_stride + t], kBlockTokens) * kBlockTokens /
                    (fast ? 127 : 32767);
      }
      for (int c = 0; c < rank; ++c) {
        double expected = before[i * acc_stride + c];
        for (int t = 0; t < tokens; ++t) {
          expected += static_cast<double>(p[i * p_stride + t]) * values[c * tokens + t];
        }
        const double size = LargestMagnitude(&values[static_cast<size_t>(c) * tokens], tokens);
        ASSERT_NEAR(acc[i * acc_stride + c], expected, (4e-6 * weights + rounding) * size + 1e-6)
            << "row " << i;
      }
      const int64_t end = i + 1 < rows ? (i + 1) * acc_stride : (i * acc_stride + rank);
      for (int64_t j = i * acc_stride + rank; j < end; ++j) ASSERT_EQ(acc[j], before[j]);
    }
  }
}

TEST_P(PageKernels, DecodedBlocksEqualTheReference) {
  for (int trial = 0; trial < 80; ++trial) {
    const Shape shape = RandomShape();
    SCOPED_TRACE(shape.Describe());
    const PagePlan& plan = shape.plan;
    const Pages pages = MakePages(plan, RandomLatents(shape), shape.n_pages);
    const size_t n = static_cast<size_t>(plan.rank) * kBlockTokens;
    for (const uint8_t* page : pages.pointers) {
      for (int b = 0; b < plan.blocks(); ++b) {
        std::vector<float> expected(n), out(n);
        Reference().decode_block(plan, page, b, expected.data());
        kernels().decode_block(plan, page, b, out.data());
        for (size_t i = 0; i < n; ++i) {
          // A fused multiply-add differs from the reference in the last bit of the larger term.
          const float size = LargestMagnitude(&expected[i / 32 * 32], 32);
          ASSERT_NEAR(out[i], expected[i], plan.raw ? 0 : 3e-7f * size) << "channel " << i / 32;
        }
        const int64_t stride = plan.rank + trial % 4;
        std::vector<float> tokens(static_cast<size_t>(31 * stride + plan.rank), 99.0f);
        kernels().decode_block_tokens(plan, page, b, tokens.data(), stride);
        for (int t = 0; t < 32; ++t) {
          for (int c = 0; c < plan.rank; ++c) {
            ASSERT_EQ(tokens[t * stride + c], out[c * 32 + t]);
          }
          for (int64_t c = plan.rank; t < 31 && c < stride; ++c) {
            ASSERT_EQ(tokens[t * stride + c], 99.0f);
          }
        }
      }
    }
  }
}

TEST_P(PageKernels, EncodedBytesEqualTheReference) {
  for (int trial = 0; trial < 150; ++trial) {
    Shape shape = RandomShape();
    shape.n_pages = 1;
    SCOPED_TRACE(shape.Describe());
    const PagePlan& plan = shape.plan;
    std::vector<float> x = RandomLatents(shape);
    if (trial % 4 == 0) {  // codes exactly between two levels, and both zeros
      for (float& v : x) v = static_cast<float>(Uniform(-9, 9)) * 0.5f;
      for (float& v : x) v = v == 0 && Uniform(0, 1) ? -0.0f : v;
    }
    // Latents may be wider apart than a page.
    const int64_t stride = plan.page_tokens + trial % 3;
    std::vector<float> wide(static_cast<size_t>((plan.rank - 1) * stride + plan.page_tokens));
    for (int c = 0; c < plan.rank; ++c) {
      std::copy_n(&x[static_cast<size_t>(c) * plan.page_tokens], plan.page_tokens,
                  &wide[c * stride]);
    }
    std::vector<uint8_t> expected(plan.page_bytes() + 8, 0x11), page(plan.page_bytes() + 8, 0x11);
    Reference().encode_page(plan, wide.data(), stride, expected.data());
    kernels().encode_page(plan, wide.data(), stride, page.data());
    ASSERT_EQ(page, expected);
  }
}

TEST_P(PageKernels, EmptySidesAndRunsAreFine) {
  const Pages none = MakePages(PagePlan::Make({}, ScaleFormat::kLog8, 32), {}, 2);
  const std::vector<float> out = RunScore(kernels(), none, {}, 0, 1);
  for (int t = 0; t < 64; ++t) EXPECT_EQ(out[t], 0.0f);
  const Pages no_pages = MakePages(PagePlan::Make({4, 2}, ScaleFormat::kLog8, 32), {}, 0);
  std::vector<float> acc = {1.0f, 2.0f}, scratch(4);
  kernels().accumulate({.run = no_pages.run(),
                        .p = scratch.data(),
                        .rows = 1,
                        .acc = acc.data(),
                        .acc_stride = 2,
                        .scratch = scratch.data()});
  EXPECT_EQ(acc, (std::vector<float>{1.0f, 2.0f}));
}

// --- waves ---

TEST_P(Kernels, WaveScoresAreThoseOfTheTables) {
  for (int trial = 0; trial < 40; ++trial) {
    const int planes = Uniform(1, 70), rows = Uniform(1, 9), blocks = Uniform(0, kWaveBlocks);
    WavePlan plan;
    plan.planes = planes;
    for (int i = 0; i < planes; ++i) (Uniform(0, 2) ? plan.slow : plan.fast).push_back(i);
    const size_t n = static_cast<size_t>(planes);
    plan.cos_block = Normal(n * kWaveBlocks);
    plan.sin_block = Normal(n * kWaveBlocks);
    plan.cos_near = Normal(plan.fast.size() * kWaveHalf);
    plan.sin_near = Normal(plan.fast.size() * kWaveHalf);
    plan.even = Normal(plan.slow.size() * kWaveTerms);
    plan.odd = Normal(plan.slow.size() * kWaveTerms);
    const std::vector<float> q = Normal(static_cast<size_t>(rows) * 2 * n);
    const int64_t stride = blocks * kWaveBlock + Uniform(0, 5);
    const std::vector<float> before = Normal(static_cast<size_t>(rows * stride));
    std::vector<float> expected = before, out = before;
    Reference().wave_scores({&plan, q.data(), rows, blocks, expected.data(), stride});
    kernels().wave_scores({&plan, q.data(), rows, blocks, out.data(), stride});
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_NEAR(out[i], expected[i], 1e-4) << "planes " << planes << " at " << i;
    }
  }
}

// --- gemm ---

// A matrix whose last row ends at its last column.
struct Matrix {
  int64_t stride;
  std::vector<float> data;
};

class Gemm : public Kernels {
 protected:
  Matrix Random(int rows, int columns) {
    const int64_t stride = columns + Uniform(0, 3);
    return {stride, Normal(rows > 0 ? static_cast<size_t>((rows - 1) * stride + columns) : 0)};
  }

  void Run(const Matrix& a, const Matrix& b, Matrix& c, int m, int n, int k, bool accumulate) {
    kernels().gemm({.a = a.data.data(),
                    .lda = a.stride,
                    .b = b.data.data(),
                    .ldb = b.stride,
                    .c = c.data.data(),
                    .ldc = c.stride,
                    .m = m,
                    .n = n,
                    .k = k,
                    .accumulate = accumulate});
  }

  void Check(int m, int n, int k, bool accumulate) {
    SCOPED_TRACE(std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k));
    const Matrix a = Random(m, k), b = Random(k, n), before = Random(m, n);
    Matrix c = before;
    Run(a, b, c, m, n, k, accumulate);
    std::vector<float> touched(c.data.size());
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        double expected = accumulate ? before.data[i * c.stride + j] : 0.0;
        double size = std::fabs(expected);
        for (int l = 0; l < k; ++l) {
          const double term =
              static_cast<double>(a.data[i * a.stride + l]) * b.data[l * b.stride + j];
          expected += term;
          size += std::fabs(term);
        }
        ASSERT_NEAR(c.data[i * c.stride + j], expected, 1e-6 * size) << i << ", " << j;
        touched[i * c.stride + j] = 1;
      }
    }
    for (size_t i = 0; i < touched.size(); ++i) {
      if (!touched[i]) {
        ASSERT_EQ(c.data[i], before.data[i]);
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(All, Gemm, testing::ValuesIn(AllKernels()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST_P(Gemm, EveryTailIsRight) {
  for (int m = 1; m <= 25; ++m) {
    for (int n = 1; n <= 67; n += m % 3 + 1) Check(m, n, 1 + (m * n) % 9, (m + n) % 2 != 0);
  }
}

TEST_P(Gemm, DepthsFromNoneToMany) {
  for (const int k : {0, 1, 2, 63, 64, 255, 256, 257, 300, 600, 1024}) {
    for (const bool accumulate : {false, true}) {
      Check(3, 5, k, accumulate);
      Check(9, 33, k, accumulate);
      Check(17, 64, k, accumulate);
    }
  }
  Check(0, 5, 3, false);
  Check(5, 0, 3, true);
}

TEST_P(Gemm, ElementsDoNotDependOnTheSizesOfTheMatrices) {
  // Chunked prompts must give the bytes of unchunked ones.
  const int m = 37, n = 83, k = 300;
  const Matrix a = Random(m, k), b = Random(k, n);
  Matrix whole = Random(m, n);
  Run(a, b, whole, m, n, k, false);
  for (const int rows : {1, 5, 8}) {
    for (const int columns : {3, 16, 40}) {
      const Matrix part_a = {a.stride, {a.data.begin() + 4 * a.stride, a.data.end()}};
      const Matrix part_b = {b.stride, {b.data.begin() + 7, b.data.end()}};
      Matrix part = Random(rows, columns);
      Run(part_a, part_b, part, rows, columns, k, false);
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < columns; ++j) {
          ASSERT_EQ(part.data[i * part.stride + j], whole.data[(i + 4) * whole.stride + j + 7]);
        }
      }
    }
  }
}

// --- projections ---

class Projections : public Kernels {
 protected:
  // A basis whose last row ends at its last column, and rows of x.
  struct Case {
    int64_t stride, x_stride, out_stride;
    std::vector<uint16_t> basis;
    std::vector<float> x, out;
  };
  Case Random(int rank, int dim, int rows, int x_width, int out_width) {
    Case c{dim + Uniform(0, 3), x_width + Uniform(0, 3), out_width + Uniform(0, 3), {}, {}, {}};
    const auto size = [](int n, int64_t stride, int width) {
      return n > 0 && width > 0 ? static_cast<size_t>((n - 1) * stride + width) : size_t{0};
    };
    for (const float v : Normal(size(rank, c.stride, dim))) c.basis.push_back(F32ToF16(v));
    c.x = Normal(size(rows, c.x_stride, x_width));
    c.out = Normal(size(rows, c.out_stride, out_width));
    return c;
  }
  static BasisArgs Args(Case& c, int rank, int dim, int rows) {
    return {c.basis.data(), c.stride, rank,         dim,         c.x.data(),
            c.x_stride,     rows,     c.out.data(), c.out_stride};
  }

  void Check(bool expand, int rank, int dim, int rows) {
    SCOPED_TRACE((expand ? "expand " : "project ") + std::to_string(rank) + " of " +
                 std::to_string(dim) + ", rows " + std::to_string(rows));
    const int in = expand ? rank : dim, n = expand ? dim : rank;
    Case c = Random(rank, dim, rows, in, n);
    const Case before = c;
    (expand ? kernels().expand : kernels().project)(Args(c, rank, dim, rows));
    std::vector<char> touched(c.out.size());
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < n; ++j) {
        const size_t at = static_cast<size_t>(i * c.out_stride + j);
        double expected = expand ? before.out[at] : 0.0, size = std::fabs(expected);
        for (int l = 0; l < in; ++l) {
          const int64_t channel = expand ? l : j, d = expand ? j : l;
          const double term = static_cast<double>(c.x[static_cast<size_t>(i * c.x_stride + l)]) *
                              F16ToF32(c.basis[static_cast<size_t>(channel * c.stride + d)]);
          expected += term, size += std::fabs(term);
        }
        ASSERT_NEAR(c.out[at], expected, 1e-6 * size) << i << ", " << j;
        touched[at] = 1;
      }
    }
    for (size_t i = 0; i < touched.size(); ++i) {
      if (!touched[i]) {
        ASSERT_EQ(c.out[i], before.out[i]);
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(All, Projections, testing::ValuesIn(AllKernels()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST_P(Projections, EveryTailIsRight) {
  for (const bool expand : {false, true}) {
    for (int rank = 1; rank <= 9; ++rank) {
      for (int dim = 1; dim <= 70; dim += rank % 3 + 1) Check(expand, rank, dim, 1 + dim % 6);
    }
    for (const int dim : {64, 80, 96, 128, 256}) {
      for (const int rows : {1, 2, 3, 4, 5, 8, 9, 17}) Check(expand, dim / 2, dim, rows);
    }
    Check(expand, 0, 7, 2);
    Check(expand, 5, 0, 2);
    Check(expand, 5, 7, 0);
  }
}

TEST_P(Projections, RowsDoNotDependOnHowManyAreTaken) {
  const int rank = 21, dim = 83, rows = 11;
  for (const bool expand : {false, true}) {
    const auto run = expand ? kernels().expand : kernels().project;
    Case whole = Random(rank, dim, rows, expand ? rank : dim, expand ? dim : rank);
    Case parts = whole;
    run(Args(whole, rank, dim, rows));
    for (int row = 0, n = 1; row < rows; row += n, n = std::min(n + 1, rows - row)) {
      BasisArgs args = Args(parts, rank, dim, n);
      args.x += row * args.x_stride, args.out += row * args.out_stride;
      run(args);
    }
    EXPECT_EQ(whole.out, parts.out);
  }
}

// --- vectors ---

TEST_P(Kernels, ExpSumIsAccurateAndMapsMinusInfinityToZero) {
  for (const int n : {0, 1, 3, 7, 8, 15, 16, 17, 31, 64, 65, 200, 1000}) {
    std::vector<float> x = Normal(static_cast<size_t>(n), 20.0f);
    for (size_t i = 0; i < x.size(); i += 5) x[i] = -kInf;
    const float max =
        n == 0 ? 0.0f : std::max(LargestMagnitude(x.data() + 1, n > 1 ? 1 : 0), 60.0f);
    const std::vector<float> before = x;
    const float sum = kernels().exp_sum(x.data(), n, max);
    double expected_sum = 0;
    for (int i = 0; i < n; ++i) {
      const double difference = static_cast<double>(before[i]) - max;
      const double expected = std::exp(difference);
      // The second term: x - max is rounded to float. Below 2^-126 the result may be 0.
      const double relative = 5e-7 + (before[i] == -kInf ? 0 : 6e-8 * std::fabs(difference));
      ASSERT_NEAR(x[i], expected, relative * expected + 1.3e-38) << difference;
      if (before[i] == -kInf) {
        ASSERT_EQ(x[i], 0.0f);
      }
      expected_sum += expected;
    }
    EXPECT_NEAR(sum, expected_sum, 3e-6 * expected_sum + 1e-37) << n;
  }
}

TEST_P(Kernels, ExpIsAccurateOverItsWholeRange) {
  std::vector<float> x;
  for (float v = -87.3f; v <= 80.0f; v += 0.0113f) x.push_back(v);
  const std::vector<float> before = x;
  kernels().exp_sum(x.data(), static_cast<int64_t>(x.size()), 0.0f);
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_NEAR(x[i] / std::exp(static_cast<double>(before[i])), 1.0, 5e-7) << before[i];
  }
  std::vector<float> far = {-87.4f, -100.0f, -1e30f, -kInf, 0.0f};
  EXPECT_EQ(kernels().exp_sum(far.data(), 5, 0.0f), 1.0f);
}

TEST_P(Kernels, MaxFindsTheLargestAnywhere) {
  EXPECT_EQ(kernels().max(nullptr, 0), -kInf);
  for (int n = 1; n < 70; ++n) {
    std::vector<float> x = Normal(static_cast<size_t>(n));
    for (float& v : x) v = -std::fabs(v) - 1;
    for (int at = 0; at < n; ++at) {
      std::vector<float> y = x;
      y[at] = -0.5f;
      ASSERT_EQ(kernels().max(y.data(), n), -0.5f);
    }
  }
  const std::vector<float> masked(40, -kInf);
  EXPECT_EQ(kernels().max(masked.data(), 40), -kInf);
}

TEST_P(Kernels, SoftCapIsTheScaledTanh) {
  for (const float cap : {0.5f, 30.0f, 50.0f}) {
    std::vector<float> x;
    for (int e = -12; e <= 4; ++e) {
      for (float m = 1.0f; m < 10; m += 0.37f) {
        x.push_back(cap * m * std::pow(10.0f, static_cast<float>(e)));
        x.push_back(-x.back());
      }
    }
    x.push_back(0.0f);
    const std::vector<float> before = x;
    kernels().soft_cap(x.data(), static_cast<int64_t>(x.size()), cap);
    for (size_t i = 0; i < x.size(); ++i) {
      const double expected = cap * std::tanh(static_cast<double>(before[i]) / cap);
      ASSERT_NEAR(x[i], expected, 1e-6 * std::fabs(expected)) << before[i];
    }
  }
}

TEST_P(Kernels, F16ConversionIsExactBothWays) {
  std::vector<uint16_t> halves(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  std::vector<float> floats(halves.size());
  kernels().f16_to_f32(halves.data(), floats.data(), 65536);
  std::vector<float> around;  // and the floats where rounding decides
  for (size_t i = 0; i < halves.size(); ++i) {
    const float expected = F16ToF32(halves[i]);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(floats[i])) << i;
      continue;
    }
    ASSERT_EQ(std::memcmp(&floats[i], &expected, 4), 0) << i;
    const float next = F16ToF32(static_cast<uint16_t>(i + 1));
    if (std::isfinite(expected) && std::isfinite(next)) {
      const float middle = expected * 0.5f + next * 0.5f;
      for (const float v :
           {expected, middle, std::nextafter(middle, kInf), std::nextafter(middle, -kInf)}) {
        around.push_back(v);
      }
    }
  }
  for (const float v : {65519.9f, 65520.0f, 1e6f, kInf, 1e-10f, 2.98e-8f, 2.99e-8f}) {
    around.push_back(v);
    around.push_back(-v);
  }
  std::vector<uint16_t> back(around.size());
  kernels().f32_to_f16(around.data(), back.data(), static_cast<int64_t>(around.size()));
  for (size_t i = 0; i < around.size(); ++i) {
    ASSERT_EQ(back[i], F32ToF16(around[i])) << around[i];
  }
  const float nan = std::nanf("");
  std::vector<float> nans(20, nan);
  kernels().f32_to_f16(nans.data(), back.data(), 20);
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(std::isnan(F16ToF32(back[i])));
}

TEST_P(Kernels, F16ConversionHandlesShortAndUnalignedArrays) {
  for (int n = 0; n < 40; ++n) {
    const std::vector<float> x = Normal(static_cast<size_t>(n));
    std::vector<uint16_t> halves(static_cast<size_t>(n) + 1, 0x1234);
    kernels().f32_to_f16(x.data(), halves.data() + 1, n);  // 2 bytes past any vector's alignment
    EXPECT_EQ(halves[0], 0x1234);
    std::vector<float> back(static_cast<size_t>(n));
    kernels().f16_to_f32(halves.data() + 1, back.data(), n);
    for (int i = 0; i < n; ++i) ASSERT_EQ(back[i], F16ToF32(F32ToF16(x[i])));
  }
}

TEST_P(Kernels, FindBadReturnsTheFirstNaNInfOrTooLarge) {
  EXPECT_EQ(kernels().find_bad(nullptr, 0, 65504.0f), -1);
  for (int n = 1; n < 80; ++n) {
    const std::vector<float> good(static_cast<size_t>(n), -65504.0f);
    ASSERT_EQ(kernels().find_bad(good.data(), n, 65504.0f), -1);
    for (const float bad : {std::nanf(""), kInf, -kInf, 65505.0f, -65505.0f}) {
      for (int at = 0; at < n; at += 3) {
        std::vector<float> x = good;
        x[at] = bad;
        x[n - 1] = bad;
        ASSERT_EQ(kernels().find_bad(x.data(), n, 65504.0f), at);
      }
    }
  }
}

// --- dispatch ---

TEST(Dispatch, OffersTheReferenceAndDistinctTargets) {
  const auto all = AllKernels();
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all[0], &Reference());
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_STRNE(all[i]->name, all[j]->name);
  }
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) {
    EXPECT_TRUE(std::any_of(all.begin(), all.end(), [](const KernelTable* table) {
      return std::string(table->name) == "AVX2";
    }));
  }
#endif
}

// Prints what Active() does under PALU_TARGET = target and exits.
[[noreturn]] void TryTarget(const char* target) {
  setenv("PALU_TARGET", target, 1);
  try {
    std::fprintf(stderr, "runs %s", Active().name);
  } catch (const ConfigError& error) {
    std::fprintf(stderr, "throws %s", error.what());
  }
  std::exit(0);
}

TEST(Dispatch, EnvironmentForcesATarget) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // the choice is made once per process
  for (const KernelTable* table : AllKernels()) {
    EXPECT_EXIT(TryTarget(table->name), testing::ExitedWithCode(0),
                std::string("runs ") + table->name);
  }
  EXPECT_EXIT(TryTarget("abacus"), testing::ExitedWithCode(0),
              "throws PALU_TARGET is \"abacus\"; this CPU runs reference");
  // Unset or empty: the best target.
  const auto all = AllKernels();
  EXPECT_EXIT(TryTarget(""), testing::ExitedWithCode(0),
              std::string("runs ") + (all.size() > 1 ? all[1] : all[0])->name);
}

}  // namespace
}  // namespace palu
