#include "methods/side_budgets.h"

#include <algorithm>
#include <cmath>

namespace palu {

std::vector<double> ShareBits(const std::vector<SideCost>& sides, double mean) {
  double elements = 0;
  for (const SideCost& side : sides) elements += side.elements;
  std::vector<double> bits(sides.size());
  const auto used = [&](double constant) {
    double sum = 0;
    for (size_t i = 0; i < sides.size(); ++i) {
      const double wanted = constant + std::log(sides[i].divergence) / std::log(kFallPerBit);
      bits[i] = std::clamp(wanted, kLeastBits, kMostBits);
      sum += bits[i] * sides[i].elements;
    }
    return sum;
  };
  // The sum grows with the constant.
  double low = -100, high = 100;
  for (int step = 0; step < 100; ++step) {
    const double middle = (low + high) / 2;
    (used(middle) > mean * elements ? high : low) = middle;
  }
  used(low);
  return bits;
}

}  // namespace palu
