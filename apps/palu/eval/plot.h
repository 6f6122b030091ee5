// File: plot.h - the plot of quality over size, as SVG to stand in an HTML page.
#ifndef PALU_APPS_EVAL_PLOT_H_
#define PALU_APPS_EVAL_PLOT_H_

#include <string>
#include <vector>

namespace palu::app {

// Whose cache it is; each has a colour and a shape.
enum class CacheKind { kPalu, kSibling, kExact, kLlama };
// Of a cache text, such as "palu:bits=auto:3" or "llama:q8_0".
CacheKind KindOf(const std::string& cache);
// "palu", "sibling", "exact", "llama": the CSS class, and the colour --NAME of the page.
const char* KindClass(CacheKind kind);
// For legends.
const char* KindTitle(CacheKind kind);
// The mark of a kind around a centre.
std::string Mark(CacheKind kind, double x, double y);

struct PlotPoint {
  std::string label;
  CacheKind kind = CacheKind::kPalu;
  double bits = 0;   // > 0
  double value = 0;  // drawn at the lower edge when it is not positive
  double error = 0;  // half the length of the bar; 0 or NaN: none
};

struct PlotText {
  std::string title, y_axis;
  double floor = 0;  // drawn as a line; 0 or NaN: none
};

// `value` over `bits`, both on logarithmic axes, as <svg>. Labels are placed where they hide
// neither a point nor each other; one that finds no place is left to the point's tooltip.
// Colours come from CSS variables of the page: --fg, --muted, --grid, and one per kind.
std::string RateQualityPlot(const PlotText& text, const std::vector<PlotPoint>& points);

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_PLOT_H_
