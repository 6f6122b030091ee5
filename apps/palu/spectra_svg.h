// File: spectra_svg.h - a plot of spectra: one SVG file that needs nothing else.
#ifndef PALU_APPS_SPECTRA_SVG_H_
#define PALU_APPS_SPECTRA_SVG_H_

#include <string>

#include "spectra.h"

namespace palu::app {

// Share of energy over rank, one curve per layer (the mean of its head groups), coloured by depth.
// Columns: keys as cached, keys un-rotated, values. Rows: both energy rules.
std::string ToSvg(const SpectraReport& report);

}  // namespace palu::app

#endif  // PALU_APPS_SPECTRA_SVG_H_
