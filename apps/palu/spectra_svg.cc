#include "spectra_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>

#include "svg.h"

namespace palu::app {
namespace {

// Pixels.
constexpr double kPlotWidth = 300, kPlotHeight = 220;
constexpr double kLeft = 84, kTop = 86, kGapX = 58, kGapY = 66, kRight = 110, kBottom = 52;

constexpr std::array<EnergyRule, 2> kRules = {EnergyRule::kSum, EnergyRule::kSquares};
constexpr std::array<const char*, 2> kRowTitles = {"share of the sum of sigma",
                                                   "share of the sum of sigma²"};

std::string NameOf(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

std::string Line(double x1, double y1, double x2, double y2, const char* colour) {
  return SvgLine(x1, y1, x2, y2, fmt::format("stroke=\"{}\"", colour));
}

// Viridis without its pale end, by linear interpolation: dark = first layer.
std::string Colour(double depth) {
  constexpr std::array<std::array<double, 3>, 5> kStops = {{
      {68, 1, 84},
      {59, 82, 139},
      {33, 145, 140},
      {94, 201, 98},
      {200, 215, 40},
  }};
  const double at = std::clamp(depth, 0.0, 1.0) * (kStops.size() - 1);
  const size_t i = std::min<size_t>(static_cast<size_t>(at), kStops.size() - 2);
  std::array<int, 3> rgb{};
  for (size_t c = 0; c < 3; ++c) {
    const double mixed = kStops[i][c] + (at - i) * (kStops[i + 1][c] - kStops[i][c]);
    rgb[c] = static_cast<int>(std::lround(mixed));
  }
  return fmt::format("#{:02x}{:02x}{:02x}", rgb[0], rgb[1], rgb[2]);
}

// Energy held by the first 0, 1, ... dims, averaged over head groups; empty without energy.
std::vector<double> Cumulative(const LayerSpectra& layer, Side side, EnergyRule rule) {
  std::vector<double> mean;
  int counted = 0;
  for (const GroupSpectra& group : layer.groups) {
    std::vector<double> sums = {0};
    for (const double sigma : group.side[side].sigma) {
      sums.push_back(sums.back() + (rule == EnergyRule::kSum ? sigma : sigma * sigma));
    }
    if (!(sums.back() > 0)) continue;
    mean.resize(sums.size(), 0);
    for (size_t i = 0; i < sums.size(); ++i) mean[i] += sums[i] / sums.back();
    ++counted;
  }
  for (double& value : mean) value /= counted;
  return mean;
}

int MaxDims(const SpectraReport& report, Side side) {
  size_t dims = 1;
  for (const LayerSpectra& layer : report.layers) {
    for (const GroupSpectra& group : layer.groups) {
      dims = std::max(dims, group.side[side].sigma.size());
    }
  }
  return static_cast<int>(dims);
}

std::string Axes(double left, double top, int dims, const std::string& title) {
  const double bottom = top + kPlotHeight;
  std::string svg = SvgText(left + kPlotWidth / 2, top - 10, title, "class=\"title\"");
  for (const double share : {0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 1.0}) {
    const double y = bottom - share * kPlotHeight;
    svg += Line(left, y, left + kPlotWidth, y, share == 0 ? "#444" : "#ddd");
    // 95 % has a line, but its label would touch its neighbours.
    if (share != 0.95)
      svg += SvgText(left - 6, y + 4, fmt::format("{:.0f} %", share * 100), "class=\"y\"");
  }
  for (int tick = 0; tick <= 4; ++tick) {
    const double x = left + kPlotWidth * tick / 4;
    svg += Line(x, top, x, bottom + 4, tick == 0 ? "#444" : "#eee");
    svg += SvgText(x, bottom + 18, fmt::format("{:g}", dims * tick / 4.0), "class=\"x\"");
  }
  svg += SvgText(left + kPlotWidth / 2, bottom + 36, "rank", "class=\"x\"");
  return svg;
}

std::string Curves(const SpectraReport& report, Side side, EnergyRule rule, double left, double top,
                   int dims) {
  std::string svg;
  const size_t count = report.layers.size();
  for (size_t i = 0; i < count; ++i) {
    const std::vector<double> shares = Cumulative(report.layers[i], side, rule);
    if (shares.empty()) continue;
    std::string points;
    for (size_t r = 0; r < shares.size(); ++r) {
      points += fmt::format("{}{:.1f},{:.1f}", r == 0 ? "" : " ", left + kPlotWidth * r / dims,
                            top + kPlotHeight * (1 - shares[r]));
    }
    svg += fmt::format(
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.3\" "
        "stroke-opacity=\"0.8\"><title>layer {}</title></polyline>\n",
        points, Colour(count > 1 ? static_cast<double>(i) / (count - 1) : 0),
        report.layers[i].layer);
  }
  return svg;
}

// Colour of each depth, first layer at the top.
std::string Legend(const SpectraReport& report, double left, double top) {
  constexpr int kSteps = 40;
  constexpr double kHeight = kPlotHeight / kSteps;
  if (report.layers.empty()) return "";
  std::string svg = SvgText(left, top - 10, "layer");
  for (int i = 0; i < kSteps; ++i) {
    svg += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"14\" height=\"{:.1f}\" fill=\"{}\"/>\n", left,
        top + i * kHeight, kHeight + 0.3, Colour(static_cast<double>(i) / (kSteps - 1)));
  }
  svg += SvgText(left + 20, top + 10, std::to_string(report.layers.front().layer));
  svg += SvgText(left + 20, top + kPlotHeight, std::to_string(report.layers.back().layer));
  return svg;
}

}  // namespace

std::string ToSvg(const SpectraReport& report) {
  const double width = kLeft + kSides * kPlotWidth + (kSides - 1) * kGapX + kRight;
  const double height = kTop + 2 * kPlotHeight + kGapY + kBottom;
  std::string svg = fmt::format(
      "<svg class=\"spectra\" xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" "
      "height=\"{1:.0f}\" "
      "viewBox=\"0 0 {0:.0f} {1:.0f}\">\n"
      // The class keeps the style to this plot when it stands in a page with others.
      "<style>.spectra text{{font:12px sans-serif;fill:#222}} "
      ".spectra .title{{font-weight:bold;text-anchor:middle}} "
      ".spectra .head{{font-size:16px;font-weight:bold}} .spectra .x{{text-anchor:middle}} "
      ".spectra .y{{text-anchor:end}}</style>\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
      width, height);
  svg += SvgText(kLeft, 26, "Energy of K and V held by a basis of rank r", "class=\"head\"");
  svg +=
      SvgText(kLeft, 46,
              fmt::format("{}, {} tokens of {}; one curve per layer, the mean of its head groups",
                          NameOf(report.model), report.tokens, NameOf(report.file)));
  for (size_t row = 0; row < kRules.size(); ++row) {
    const double top = kTop + row * (kPlotHeight + kGapY);
    const double middle = top + kPlotHeight / 2;
    svg += SvgText(22, middle, kRowTitles[row],
                   fmt::format("class=\"x\" transform=\"rotate(-90 22 {:.1f})\"", middle));
    for (int column = 0; column < kSides; ++column) {
      const auto side = static_cast<Side>(column);
      const double left = kLeft + column * (kPlotWidth + kGapX);
      const int dims = MaxDims(report, side);
      svg += Axes(left, top, dims, kSideTitles[column]);
      svg += Curves(report, side, kRules[row], left, top, dims);
    }
  }
  svg += Legend(report, width - kRight + 24, kTop);
  return svg + "</svg>\n";
}

}  // namespace palu::app
