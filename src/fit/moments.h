// File: moments.h - first and second moments of K or V, and what rotation does to them.
#ifndef PALU_SRC_FIT_MOMENTS_H_
#define PALU_SRC_FIT_MOMENTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "palu/rope.h"

namespace palu {

// Raw (uncentred) moments of rows x of length dim, accumulated in double.
struct Moments {
  int dim = 0;
  double rows = 0;
  std::vector<double> sum;     // [dim]       sum of x
  std::vector<double> second;  // [dim][dim]  sum of x x^T, symmetric

  explicit Moments(int d) : dim(d), sum(d, 0.0), second(static_cast<size_t>(d) * d, 0.0) {}

  // The moments of dims [first, first + n) alone.
  Moments Part(int first, int n) const;
  // x: [n][stride], n rows. Cost: n * dim^2 / 2 multiply-adds in double.
  void Add(const float* x, int64_t n, int64_t stride);
  void Add(const Moments& other);
  // The same rows less their mean, which is returned.
  std::vector<double> Centre();
  // Sum of |x|^2.
  double Energy() const;
};

// Turns rows back: x[i] at position `position + i` becomes R^-1 x. x: [n][stride], heads share
// positions.
void Unrotate(const RopeParams& rope, int64_t position, float* x, int64_t n, int64_t stride);

// The moments of R_p x averaged over positions p = 0 .. positions-1, from the moments of un-rotated
// rows x. Each pair of planes only meets the averages of exp(i (a -+ b) p), a geometric series: no
// sum over positions.
// `heads` heads of dim / heads dims lie side by side in a row; each is rotated alike.
Moments AverageOverPositions(const Moments& unrotated, const RopeParams& rope, int64_t positions,
                             int heads = 1);

}  // namespace palu

#endif  // PALU_SRC_FIT_MOMENTS_H_
