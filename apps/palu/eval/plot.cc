#include "eval/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "svg.h"

namespace palu::app {
namespace {

// Pixels.
constexpr double kWidth = 1000, kHeight = 540;
constexpr double kLeft = 78, kRight = 24, kTop = 64, kBottom = 56;
constexpr double kMark = 5;                             // half a mark's size
constexpr double kLetterWidth = 7, kLetterHeight = 13;  // of labels; fonts differ, few are wider
constexpr size_t kLongestLabel = 38;                    // letters

constexpr double kLeastValue = 1e-7;  // below it divergences are rounding

struct Box {
  double x0 = 0, y0 = 0, x1 = 0, y1 = 0;
  bool Overlaps(const Box& o) const { return x0 < o.x1 && o.x0 < x1 && y0 < o.y1 && o.y0 < y1; }
  bool Within(const Box& o) const { return x0 >= o.x0 && x1 <= o.x1 && y0 >= o.y0 && y1 <= o.y1; }
};

constexpr Box kArea{kLeft, kTop, kWidth - kRight, kHeight - kBottom};

// A logarithmic axis; `from` is drawn at pixel `start`.
struct Axis {
  double from = 1, to = 10, start = 0, end = 1;
  double At(double value) const {
    return start + (end - start) * std::log(value / from) / std::log(to / from);
  }
};

std::string Shortened(const std::string& label) {
  return label.size() <= kLongestLabel ? label : label.substr(0, kLongestLabel - 3) + "...";
}

Axis BitsAxis(const std::vector<PlotPoint>& points) {
  Axis axis{2, 8, kArea.x0, kArea.x1};
  for (const PlotPoint& p : points) {
    axis.from = std::min(axis.from, p.bits * 0.93);
    axis.to = std::max(axis.to, p.bits * 1.07);
  }
  return axis;
}

Axis ValueAxis(const std::vector<PlotPoint>& points, double floor) {
  double low = 1e9, high = 0;
  const auto cover = [&](double value) {
    if (!(value > 0)) return;
    low = std::min(low, std::max(value, kLeastValue));
    high = std::max(high, std::max(value, kLeastValue));
  };
  for (const PlotPoint& p : points) {
    cover(p.value);
    if (p.error > 0) cover(p.value + p.error);
  }
  cover(floor);
  if (high == 0) low = 1e-4, high = 1;
  return {low / 1.6, std::max(high * 1.6, low * 10), kArea.y1, kArea.y0};
}

std::string BitsTicks(const Axis& axis) {
  constexpr std::array kTicks = {0.25, 0.5, 0.75, 1.0, 1.5,  2.0,  2.5,  3.0,  3.5,
                                 4.0,  5.0, 6.0,  8.0, 10.0, 12.0, 16.0, 24.0, 32.0};
  std::string svg;
  double last = -100;
  for (const double tick : kTicks) {
    if (tick < axis.from || tick > axis.to) continue;
    const double x = axis.At(tick);
    svg += SvgLine(x, kArea.y0, x, kArea.y1, "class=\"grid\"");
    if (x - last < 34) continue;
    svg += SvgText(x, kArea.y1 + 18, fmt::format("{:g}", tick), "class=\"middle\"");
    last = x;
  }
  return svg + SvgText((kArea.x0 + kArea.x1) / 2, kArea.y1 + 42,
                       "stored bits per element at 32,768 tokens", "class=\"middle\"");
}

std::string ValueTicks(const Axis& axis, const std::string& title) {
  std::string svg;
  const bool wide = axis.to / axis.from > 2000;  // decades alone are enough
  for (int decade = -8; decade <= 4; ++decade) {
    for (const int digit : {1, 2, 5}) {
      const double value = digit * std::pow(10.0, decade);
      if (value < axis.from || value > axis.to || (wide && digit > 1)) continue;
      const double y = axis.At(value);
      svg += SvgLine(kArea.x0, y, kArea.x1, y, "class=\"grid\"");
      svg += SvgText(kArea.x0 - 8, y + 4, fmt::format("{:g}", value), "class=\"end\"");
    }
  }
  const double middle = (kArea.y0 + kArea.y1) / 2;
  return svg + SvgText(18, middle, title,
                       fmt::format("class=\"middle\" transform=\"rotate(-90 18 {:.1f})\"", middle));
}

std::string Legend(const std::vector<PlotPoint>& points) {
  std::string svg;
  double x = kArea.x0;
  for (const CacheKind kind :
       {CacheKind::kPalu, CacheKind::kLlama, CacheKind::kSibling, CacheKind::kExact}) {
    if (std::none_of(points.begin(), points.end(),
                     [&](const PlotPoint& p) { return p.kind == kind; })) {
      continue;
    }
    const std::string title = KindTitle(kind);
    svg += Mark(kind, x + kMark, kTop - 18) + SvgText(x + 16, kTop - 14, title);
    x += 34 + kLetterWidth * static_cast<double>(title.size());
  }
  return svg;
}

// Where a label of a given size may stand beside a mark, nearest and best to read first.
std::vector<Box> Places(double x, double y, double width) {
  std::vector<Box> places;
  for (const double d : {9.0, 16.0, 26.0, 38.0, 52.0, 70.0, 90.0}) {
    const double half = kLetterHeight / 2, slant = d * 0.8;
    const std::array<std::array<double, 2>, 8> kCorners = {{
        {x + d, y - half},                            // right
        {x - d - width, y - half},                    // left
        {x + slant * 0.7, y - slant - half},          // right above
        {x + slant * 0.7, y + slant - half},          // right below
        {x - slant * 0.7 - width, y - slant - half},  // left above
        {x - slant * 0.7 - width, y + slant - half},  // left below
        {x - width / 2, y - d - half},                // above
        {x - width / 2, y + d - half},                // below
    }};
    for (const auto& [left, top] : kCorners) {
      places.push_back({left, top, left + width, top + kLetterHeight});
    }
  }
  return places;
}

struct Placed {
  double x = 0, y = 0;
  std::optional<Box> label;
};

std::vector<Placed> PlaceLabels(const std::vector<PlotPoint>& points, const Axis& bits,
                                const Axis& value) {
  std::vector<Placed> placed;
  std::vector<Box> taken;
  for (const PlotPoint& p : points) {
    const double y = p.value > 0 ? value.At(std::max(p.value, kLeastValue)) : kArea.y1;
    placed.push_back({bits.At(p.bits), std::clamp(y, kArea.y0, kArea.y1), {}});
    const Placed& at = placed.back();
    taken.push_back({at.x - kMark - 1, at.y - kMark - 1, at.x + kMark + 1, at.y + kMark + 1});
  }
  for (size_t i = 0; i < points.size(); ++i) {
    const double width = kLetterWidth * static_cast<double>(Shortened(points[i].label).size()) + 4;
    for (const Box& box : Places(placed[i].x, placed[i].y, width)) {
      if (!box.Within(kArea)) continue;
      if (std::any_of(taken.begin(), taken.end(), [&](const Box& b) { return b.Overlaps(box); })) {
        continue;
      }
      placed[i].label = box;
      taken.push_back(box);
      break;
    }
  }
  return placed;
}

std::string DrawPoint(const PlotPoint& p, const Placed& at, const Axis& value) {
  const char* kind = KindClass(p.kind);
  std::string svg = fmt::format("<g class=\"{}\"><title>{}: {:.4g} at {:.3f} bits</title>\n", kind,
                                Escape(p.label), p.value, p.bits);
  if (p.error > 0 && p.value > 0) {
    const double top = value.At(p.value + p.error);
    const double bottom = value.At(std::max(p.value - p.error, value.from));
    svg += SvgLine(at.x, top, at.x, bottom, "class=\"bar\"");
    for (const double y : {top, bottom}) svg += SvgLine(at.x - 4, y, at.x + 4, y, "class=\"bar\"");
  }
  svg += Mark(p.kind, at.x, at.y);
  if (at.label) {
    const double x = std::clamp(at.x, at.label->x0, at.label->x1);
    const double y = (at.label->y0 + at.label->y1) / 2;
    if (std::hypot(x - at.x, y - at.y) > 12) {
      svg += SvgLine(at.x, at.y, x, y > at.y ? at.label->y0 : at.label->y1, "class=\"lead\"");
    }
    svg += SvgText(at.label->x0 + 2, at.label->y1 - 3, Shortened(p.label), "class=\"label\"");
  }
  return svg + "</g>\n";
}

}  // namespace

CacheKind KindOf(const std::string& cache) {
  const std::string method = cache.substr(0, cache.find_first_of(":,"));
  if (method == "llama") return CacheKind::kLlama;
  if (method == "palu") return CacheKind::kPalu;
  return method == "fp16" || method == "fp32" ? CacheKind::kExact : CacheKind::kSibling;
}

const char* KindClass(CacheKind kind) {
  switch (kind) {
    case CacheKind::kPalu:
      return "palu";
    case CacheKind::kSibling:
      return "sibling";
    case CacheKind::kExact:
      return "exact";
    case CacheKind::kLlama:
      return "llama";
  }
  return "";
}

const char* KindTitle(CacheKind kind) {
  switch (kind) {
    case CacheKind::kPalu:
      return "palu";
    case CacheKind::kSibling:
      return "other methods";
    case CacheKind::kExact:
      return "exact";
    case CacheKind::kLlama:
      return "llama.cpp's own caches";
  }
  return "";
}

std::string Mark(CacheKind kind, double x, double y) {
  const char* name = KindClass(kind);
  if (kind == CacheKind::kPalu) {
    return fmt::format("<circle class=\"mark {}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\"/>\n", name,
                       x, y, kMark);
  }
  if (kind == CacheKind::kLlama) {
    return fmt::format(
        "<rect class=\"mark {}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{}\" height=\"{}\"/>\n", name,
        x - kMark, y - kMark, 2 * kMark, 2 * kMark);
  }
  const double up = kind == CacheKind::kSibling ? kMark : kMark + 1;
  const std::string bottom =
      kind == CacheKind::kSibling
          ? fmt::format("{:.1f},{:.1f} {:.1f},{:.1f}", x + kMark, y + kMark, x - kMark, y + kMark)
          : fmt::format("{:.1f},{:.1f} {:.1f},{:.1f} {:.1f},{:.1f}", x + up, y, x, y + up, x - up,
                        y);
  return fmt::format("<polygon class=\"mark {}\" points=\"{:.1f},{:.1f} {}\"/>\n", name, x, y - up,
                     bottom);
}

std::string RateQualityPlot(const PlotText& text, const std::vector<PlotPoint>& points) {
  const Axis bits = BitsAxis(points);
  const Axis value = ValueAxis(points, text.floor);
  std::string svg = fmt::format(
      "<svg class=\"plot\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "role=\"img\" aria-label=\"{2}\">\n",
      kWidth, kHeight, Escape(text.title));
  svg += SvgText(kArea.x0, 24, text.title, "class=\"head\"");
  svg += BitsTicks(bits) + ValueTicks(value, text.y_axis) + Legend(points);
  svg += fmt::format(
      "<rect class=\"frame\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"/>\n",
      kArea.x0, kArea.y0, kArea.x1 - kArea.x0, kArea.y1 - kArea.y0);
  if (text.floor >= kLeastValue) {
    const double y = value.At(text.floor);
    svg += SvgLine(kArea.x0, y, kArea.x1, y, "class=\"floor\"");
    svg += SvgText(kArea.x0 + 6, y + 22 > kArea.y1 ? y - 6 : y + 15,
                   "noise floor (fp16 against itself)", "class=\"note\"");
  }
  const std::vector<Placed> placed = PlaceLabels(points, bits, value);
  for (size_t i = 0; i < points.size(); ++i) svg += DrawPoint(points[i], placed[i], value);
  return svg + "</svg>\n";
}

}  // namespace palu::app
