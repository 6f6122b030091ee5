#include "spectra.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

namespace palu::app {
namespace {

constexpr std::array<EnergyRule, 2> kRules = {EnergyRule::kSum, EnergyRule::kSquares};
constexpr std::array<const char*, 2> kRuleNames = {"sum", "squares"};
constexpr std::array<const char*, kSides> kSideKeys = {"key_cached", "key_averaged", "value"};
constexpr int kCell = 16;  // "100/110/120/128" and a space

// The ranks of one spectrum under one rule: "12/20/33/50".
std::string Cell(const std::function<int(double share)>& rank) {
  std::string text;
  for (const double share : kShares) {
    text += fmt::format("{}{}", text.empty() ? "" : "/", rank(share));
  }
  return text;
}

std::string Row(const std::string& layer, const std::string& heads,
                const std::function<std::string(Side, EnergyRule)>& cell) {
  std::string line = fmt::format("{:>6} {:<7}", layer, heads);
  for (int side = 0; side < kSides; ++side) {
    for (const EnergyRule rule : kRules) {
      line += fmt::format(" {:<{}}", cell(static_cast<Side>(side), rule), kCell);
    }
  }
  return line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
}

std::string Header() {
  std::string titles = fmt::format("{:>6} {:<7}", "", "");
  for (const char* title : kSideTitles) titles += fmt::format(" {:<{}}", title, 2 * kCell + 1);
  return titles.substr(0, titles.find_last_not_of(' ') + 1) + "\n" +
         Row("layer", "heads", [](Side, EnergyRule rule) {
           return std::string(rule == EnergyRule::kSum ? "sum" : "squares");
         });
}

// Over all layers and head groups; the lower one of two in the middle.
int MedianRank(const SpectraReport& report, Side side, EnergyRule rule, double share) {
  std::vector<int> ranks;
  for (const LayerSpectra& layer : report.layers) {
    for (const GroupSpectra& group : layer.groups) {
      ranks.push_back(group.side[side].RankFor(share, rule));
    }
  }
  if (ranks.empty()) return 0;
  const auto middle = ranks.begin() + (ranks.size() - 1) / 2;
  std::nth_element(ranks.begin(), middle, ranks.end());
  return *middle;
}

nlohmann::ordered_json SpectrumJson(const Spectrum& spectrum) {
  nlohmann::ordered_json ranks;
  for (size_t rule = 0; rule < kRules.size(); ++rule) {
    for (const double share : kShares) {
      ranks[kRuleNames[rule]][fmt::format("{:.0f}", share * 100)] =
          spectrum.RankFor(share, kRules[rule]);
    }
  }
  return {{"rows", spectrum.rows},
          {"mean_energy", spectrum.mean_energy},
          {"rank", ranks},
          {"sigma", spectrum.sigma}};
}

}  // namespace

std::string ToTable(const SpectraReport& report) {
  std::string text = fmt::format(
      "Ranks that hold 80/90/95/99 % of the energy of {} tokens (sum: of sigma, squares: of "
      "sigma^2; "
      "averaged over {} positions)\n",
      report.tokens, report.context);
  text += Header();
  for (const LayerSpectra& layer : report.layers) {
    for (const GroupSpectra& group : layer.groups) {
      const auto [first, last] = group.heads;
      const std::string heads =
          last - first == 1 ? fmt::format("{}", first) : fmt::format("{}-{}", first, last - 1);
      text += Row(std::to_string(layer.layer), heads, [&](Side side, EnergyRule rule) {
        return Cell([&](double share) { return group.side[side].RankFor(share, rule); });
      });
    }
  }
  text += Row("median", "", [&](Side side, EnergyRule rule) {
    return Cell([&](double share) { return MedianRank(report, side, rule, share); });
  });
  return text;
}

nlohmann::ordered_json ToJson(const SpectraReport& report) {
  nlohmann::ordered_json layers = nlohmann::ordered_json::array();
  for (const LayerSpectra& layer : report.layers) {
    nlohmann::ordered_json groups = nlohmann::ordered_json::array();
    for (const GroupSpectra& group : layer.groups) {
      nlohmann::ordered_json entry = {{"first_head", group.heads.first},
                                      {"last_head", group.heads.last - 1}};
      for (int side = 0; side < kSides; ++side) {
        entry[kSideKeys[side]] = SpectrumJson(group.side[side]);
      }
      groups.push_back(std::move(entry));
    }
    layers.push_back({{"layer", layer.layer}, {"groups", std::move(groups)}});
  }
  return {{"model", report.model},
          {"file", report.file},
          {"tokens", report.tokens},
          {"context", report.context},
          {"layers", std::move(layers)}};
}

}  // namespace palu::app
