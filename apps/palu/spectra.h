// File: spectra.h - the spectra of a text's keys and values, as a table and as JSON.
#ifndef PALU_APPS_SPECTRA_H_
#define PALU_APPS_SPECTRA_H_

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "palu/spectrum.h"

namespace palu::app {

// What a spectrum is of.
enum Side { kKeysCached, kKeysAveraged, kValues };
inline constexpr int kSides = 3;
inline constexpr std::array<const char*, kSides> kSideTitles = {"K as cached (rotated)",
                                                                "K un-rotated, averaged", "V"};

inline constexpr std::array<double, 4> kShares = {0.80, 0.90, 0.95, 0.99};

struct GroupSpectra {
  HeadRange heads;
  std::array<Spectrum, kSides> side;
};

struct LayerSpectra {
  int layer = 0;
  std::vector<GroupSpectra> groups;
};

struct SpectraReport {
  std::string model, file;
  int64_t tokens = 0;
  int64_t context = 0;  // positions that un-rotated keys are averaged over
  std::vector<LayerSpectra> layers;
};

// One row per layer and head group: ranks that hold 80, 90, 95 and 99 % of the energy, by both
// energy rules; then the medians.
std::string ToTable(const SpectraReport& report);
nlohmann::ordered_json ToJson(const SpectraReport& report);

}  // namespace palu::app

#endif  // PALU_APPS_SPECTRA_H_
