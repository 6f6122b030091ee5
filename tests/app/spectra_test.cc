#include "spectra.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>

#include "markup.h"
#include "spectra_svg.h"

namespace palu::app {
namespace {

// sigma_i = ratio^i in 64 dims.
Spectrum Exponential(double ratio) {
  Spectrum spectrum;
  for (int i = 0; i < 64; ++i) spectrum.sigma.push_back(std::pow(ratio, i));
  spectrum.rows = 100;
  return spectrum;
}

SpectraReport Sample() {
  SpectraReport report{
      .model = "m.gguf", .file = "a<b>&c.txt", .tokens = 100, .context = 2048, .layers = {}};
  for (int layer = 0; layer < 3; ++layer) {
    LayerSpectra spectra{.layer = layer, .groups = {}};
    for (const HeadRange heads : {HeadRange{0, 2}, HeadRange{2, 3}}) {
      spectra.groups.push_back({heads, {Exponential(0.5), Exponential(0.8), Exponential(0.9)}});
    }
    report.layers.push_back(spectra);
  }
  return report;
}

TEST(SpectraTable, HasARowPerLayerAndGroupWithTheRanksOfBothRules) {
  const std::string table = ToTable(Sample());
  // Of a geometric series with ratio q, r terms hold 1 - q^r: 0.5 needs 3, 4, 5 and 7 terms for 80,
  // 90, 95 and 99 %; its squares (ratio 0.25) need 2, 2, 3 and 4.
  EXPECT_NE(table.find("     0 0-1     3/4/5/7          2/2/3/4          8/11/14/21"),
            std::string::npos)
      << table;
  EXPECT_NE(table.find("     2 2       3/4/5/7"), std::string::npos) << table;
  EXPECT_NE(table.find("median         3/4/5/7"), std::string::npos) << table;
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 3 + 6 + 1);
}

TEST(SpectraJson, HoldsSpectraAndRanks) {
  const nlohmann::json json = nlohmann::json::parse(ToJson(Sample()).dump());
  EXPECT_EQ(json.at("tokens"), 100);
  EXPECT_EQ(json.at("context"), 2048);
  ASSERT_EQ(json.at("layers").size(), 3u);
  const nlohmann::json& group = json.at("layers")[1].at("groups")[1];
  EXPECT_EQ(group.at("first_head"), 2);
  EXPECT_EQ(group.at("last_head"), 2);
  for (const char* side : {"key_cached", "key_averaged", "value"}) {
    EXPECT_EQ(group.at(side).at("sigma").size(), 64u);
    EXPECT_EQ(group.at(side).at("rows"), 100);
  }
  EXPECT_EQ(group.at("key_cached").at("rank").at("sum").at("95"), 5);
  EXPECT_EQ(group.at("key_cached").at("rank").at("squares").at("99"), 4);
}

TEST(SpectraSvg, DrawsACurvePerLayerInSixPanels) {
  const std::string svg = ToSvg(Sample());
  ExpectWellFormed(svg);
  EXPECT_EQ(CountOf(svg, "<polyline"), 6u * 3u);
  EXPECT_NE(svg.find("a&lt;b&gt;&amp;c.txt"), std::string::npos);
  EXPECT_EQ(CountOf(svg, "nan"), 0u);
  EXPECT_EQ(CountOf(svg, "href"), 0u);  // self-contained
}

TEST(SpectraSvg, LayersWithoutEnergyHaveNoCurve) {
  SpectraReport report = Sample();
  for (GroupSpectra& group : report.layers[1].groups) {
    std::fill(group.side[kValues].sigma.begin(), group.side[kValues].sigma.end(), 0.0);
  }
  const std::string svg = ToSvg(report);
  EXPECT_EQ(CountOf(svg, "<polyline"), 6u * 3u - 2u);
  EXPECT_EQ(CountOf(svg, "nan"), 0u);
}

}  // namespace
}  // namespace palu::app
