// Scores against a plain implementation in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "eval/score.h"
#include "parallel.h"

namespace palu::app {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Logits of some positions that are spread like a model's.
struct Rows {
  std::vector<std::vector<float>> rows;

  Rows(size_t positions, size_t vocabulary, float deviation, uint32_t seed)
      : rows(positions, std::vector<float>(vocabulary)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(3, deviation);
    for (auto& row : rows) {
      for (float& x : row) x = normal(random);
    }
  }
  // Moved a little: the logits of another cache.
  Rows Moved(float deviation, float shift, uint32_t seed) const {
    Rows moved = *this;
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(shift, deviation);
    for (auto& row : moved.rows) {
      for (float& x : row) x += normal(random);
    }
    return moved;
  }
  LogitView View() const { return {rows.begin(), rows.end()}; }
};

double LogSum(const std::vector<float>& x) {
  const double max = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const float v : x) sum += std::exp(v - max);
  return max + std::log(sum);
}

double ExactKl(const std::vector<float>& a, const std::vector<float>& b) {
  const double sum_a = LogSum(a), sum_b = LogSum(b);
  double kl = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    kl += std::exp(a[i] - sum_a) * ((a[i] - sum_a) - (b[i] - sum_b));
  }
  return kl;
}

std::vector<PositionScore> Scores(const Rows& reference, const Rows& mine,
                                  const std::vector<int32_t>& next, int threads = 1) {
  ReferenceBlock block;
  block.Add(reference.View(), threads);
  return block.Score(0, mine.View(), next, threads);
}

TEST(Score, EqualsDoubleArithmeticForEveryLengthOfARow) {
  for (const size_t vocabulary : {1, 2, 63, 64, 65, 1000, 2048, 4097, 49152, 262144}) {
    const Rows reference(2, vocabulary, 4, 1);
    const Rows mine = reference.Moved(0.1f, 0.7f, 2);
    const auto last = static_cast<int32_t>(vocabulary - 1);
    const std::vector<PositionScore> scores = Scores(reference, mine, {0, last});
    for (size_t i = 0; i < 2; ++i) {
      SCOPED_TRACE(vocabulary);
      const std::vector<float>&a = reference.rows[i], &b = mine.rows[i];
      EXPECT_TRUE(scores[i].finite);
      EXPECT_NEAR(scores[i].kl, ExactKl(a, b), 2e-7);
      EXPECT_NEAR(scores[i].nll, LogSum(b) - b[i == 0 ? 0 : last], 3e-6);
      EXPECT_EQ(scores[i].same_top, std::max_element(a.begin(), a.end()) - a.begin() ==
                                        std::max_element(b.begin(), b.end()) - b.begin());
    }
  }
}

TEST(Score, SmallDivergencesAreExactEnough) {
  // Where caches near fp16 are: a divergence of 1e-6.
  const Rows reference(1, 49152, 6, 3);
  const Rows mine = reference.Moved(0.0015f, -5, 4);
  const double exact = ExactKl(reference.rows[0], mine.rows[0]);
  ASSERT_LT(exact, 3e-6);
  EXPECT_NEAR(Scores(reference, mine, {7})[0].kl, exact, 1.5e-7);
}

TEST(Score, EqualLogitsDivergeByZeroAndShareTheirTop) {
  const Rows rows(3, 5000, 2, 5);
  for (const PositionScore& score : Scores(rows, rows, {1, 2, 3})) {
    EXPECT_LT(score.kl, 1e-7);
    EXPECT_TRUE(score.same_top);
  }
}

TEST(Score, TheFirstOfEqualLogitsIsTheTop) {
  Rows reference(1, 10000, 0, 1);
  Rows mine = reference;
  reference.rows[0][4200] = reference.rows[0][9000] = 9;
  mine.rows[0][4200] = 9;
  EXPECT_TRUE(Scores(reference, mine, {0})[0].same_top);
  mine.rows[0][100] = 9;
  EXPECT_FALSE(Scores(reference, mine, {0})[0].same_top);
}

TEST(Score, LogitsThatAreNoNumbersAreFound) {
  const Rows good(1, 3000, 2, 6);
  for (const float bad : {kNan, kInf}) {
    for (const size_t at : {size_t{0}, size_t{1500}, size_t{2999}}) {
      Rows broken = good;
      broken.rows[0][at] = bad;
      EXPECT_FALSE(Scores(good, broken, {0})[0].finite) << bad << " at " << at;
      EXPECT_FALSE(Scores(broken, good, {0})[0].finite) << bad << " at " << at;
      ReferenceBlock block;
      block.Add(broken.View(), 1);
      EXPECT_FALSE(block.finite(0));
    }
  }
}

TEST(Score, ForbiddenTokensMayBeMinusInfinity) {
  Rows reference(1, 3000, 2, 7);
  reference.rows[0][5] = -kInf;
  Rows mine = reference.Moved(0.1f, 0, 8);
  const PositionScore score = Scores(reference, mine, {0})[0];
  EXPECT_TRUE(score.finite);
  mine.rows[0][5] = reference.rows[0][5] = -80;
  EXPECT_NEAR(score.kl, ExactKl(reference.rows[0], mine.rows[0]), 2e-7);
  // Impossible where the reference sees a chance: the divergence is infinite.
  mine.rows[0][6] = -kInf;
  EXPECT_FALSE(Scores(reference, mine, {0})[0].finite);
}

TEST(Score, BatchesAndThreadsDoNotChangeIt) {
  const Rows reference(11, 777, 3, 9);
  const Rows mine = reference.Moved(0.3f, 0, 10);
  const std::vector<int32_t> next(11, 42);
  const std::vector<PositionScore> whole = Scores(reference, mine, next, 1);
  ReferenceBlock block;
  const LogitView view = reference.View(), other = mine.View();
  block.Add({view.begin(), view.begin() + 4}, 3);
  block.Add({view.begin() + 4, view.end()}, 3);
  for (const size_t first : {size_t{0}, size_t{3}, size_t{10}}) {
    const std::vector<PositionScore> part =
        block.Score(static_cast<int64_t>(first), {other.begin() + first, other.end()},
                    std::span(next).subspan(first), 3);
    for (size_t i = 0; i < part.size(); ++i) {
      EXPECT_EQ(part[i].kl, whole[first + i].kl);
      EXPECT_EQ(part[i].nll, whole[first + i].nll);
    }
  }
  EXPECT_NEAR(block.Nll(5, 42), LogSum(reference.rows[5]) - reference.rows[5][42], 1e-5);
}

TEST(Estimates, AreMeanAndStandardErrorOverChunks) {
  const Estimate e = MeanOverChunks(std::vector<double>{1, 2, 3, 6});
  EXPECT_DOUBLE_EQ(e.mean, 3);
  EXPECT_DOUBLE_EQ(e.standard_error, std::sqrt(14.0 / 3 / 4));
  EXPECT_DOUBLE_EQ(MeanOverChunks(std::vector<double>{5}).mean, 5);
  EXPECT_TRUE(std::isnan(MeanOverChunks(std::vector<double>{5}).standard_error));
  EXPECT_TRUE(std::isnan(MeanOverChunks({}).mean));
}

TEST(Estimates, QuantilesAreValuesOfTheList) {
  std::vector<float> values;
  for (int i = 1000; i >= 0; --i) values.push_back(static_cast<float>(i));
  EXPECT_EQ(Quantile(values, 0.5), 500);
  EXPECT_EQ(Quantile(values, 0.999), 999);
  EXPECT_EQ(Quantile(values, 1), 1000);
  values.clear();
  EXPECT_TRUE(std::isnan(Quantile(values, 0.5)));
}

TEST(ParallelFor, DoesEverythingOnce) {
  for (const int threads : {0, 1, 3, 50}) {
    for (const int64_t n : {0, 1, 2, 100}) {
      std::vector<std::atomic<int>> calls(n);
      ParallelFor(n, threads, [&](int64_t i) { ++calls[i]; });
      for (const std::atomic<int>& count : calls) EXPECT_EQ(count, 1);
    }
  }
}

}  // namespace
}  // namespace palu::app
