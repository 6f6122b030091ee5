// File: svg.h - pieces of plots.
#ifndef PALU_APPS_SVG_H_
#define PALU_APPS_SVG_H_

#include <string>
#include <string_view>

namespace palu::app {

// Text as XML and HTML want it; also in attributes with double quotes. Control characters become
// spaces.
std::string Escape(std::string_view text);

// attributes: more of them, such as class="y".
std::string SvgText(double x, double y, std::string_view text, std::string_view attributes = "");
std::string SvgLine(double x1, double y1, double x2, double y2, std::string_view attributes);

}  // namespace palu::app

#endif  // PALU_APPS_SVG_H_
