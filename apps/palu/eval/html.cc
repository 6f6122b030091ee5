#include "eval/html.h"

#include <fmt/format.h>

#include <cmath>

#include "eval/plot.h"
#include "spectra_svg.h"
#include "svg.h"

namespace palu::app {
namespace {

constexpr char kStyle[] = R"(
:root { color-scheme: light dark; --bg: #ffffff; --fg: #1d1e22; --muted: #63666d; --grid: #e4e5ea;
  --palu: #0b62c4; --llama: #c2470c; --sibling: #7a3fc4; --exact: #5b616b; }
@media (prefers-color-scheme: dark) { :root { --bg: #17181b; --fg: #e6e7ea; --muted: #a0a4ad;
  --grid: #33363d; --palu: #62a8ff; --llama: #ff9457; --sibling: #c39bff; --exact: #aab0ba; } }
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif;
  max-width: 1240px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 25px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 8px; }
p, dl, li { color: var(--fg); } .small { color: var(--muted); font-size: 13px; }
code, pre { font: 12.5px/1.45 ui-monospace, monospace; }
pre { background: color-mix(in srgb, var(--fg) 6%, var(--bg)); padding: 10px 12px; overflow-x: auto;
  border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; font-size: 13.5px; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 3px 7px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--grid); font-variant-numeric: tabular-nums; }
th { color: var(--muted); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
svg { display: block; width: 100%; height: auto; margin: 14px 0; }
svg.key { display: inline-block; width: 12px; height: 12px; margin: 0 6px -1px 0; }
.plot text { font: 12px system-ui, sans-serif; fill: var(--fg); }
.plot .head { font-size: 15px; font-weight: 600; } .plot .middle { text-anchor: middle; }
.plot .end { text-anchor: end; } .plot .note { fill: var(--muted); }
.plot .grid { stroke: var(--grid); } .plot .frame { fill: none; stroke: var(--muted); }
.plot .floor { stroke: var(--muted); stroke-dasharray: 5 4; }
.plot .lead { stroke: var(--muted); stroke-width: 0.7; }
.palu .bar { stroke: var(--palu); } .llama .bar { stroke: var(--llama); }
.sibling .bar { stroke: var(--sibling); } .exact .bar { stroke: var(--exact); }
.mark { stroke-width: 1.4; } .mark.palu { fill: var(--palu); stroke: var(--palu); }
.mark.llama { fill: var(--bg); stroke: var(--llama); }
.mark.sibling { fill: var(--sibling); stroke: var(--sibling); }
.mark.exact { fill: var(--bg); stroke: var(--exact); }
.card { background: #ffffff; border-radius: 8px; padding: 4px; }
)";

constexpr char kReading[] =
    "KL is the divergence of a cache's next-token distribution from that of an fp16 cache, in "
    "nats, "
    "over the second half of every chunk; ± is the standard error over chunks. A row fp16 is the "
    "noise floor: the same cache in batches of another size, so that its sums run in another "
    "order. Bits are per element of K and V: code counts codes and scales, stored every byte that "
    "a sequence owns, at 32k the same when it has 32,768 tokens. Exact are tokens kept in fp16. "
    "Decode is the speed of the scored half, in batches of the size above.";

std::string Number(double value, int digits) {
  return std::isnan(value) ? "–" : fmt::format("{:.{}f}", value, digits);
}

// Small values with their significant digits.
std::string Nats(double value) {
  if (std::isnan(value)) return "–";
  return value > 0 && value < 1e-3 ? fmt::format("{:.2e}", value) : fmt::format("{:.4f}", value);
}

std::vector<PlotPoint> Points(const EvalResults& results, bool mean) {
  std::vector<PlotPoint> points;
  for (const RowResult& r : results.rows) {
    if (r.row.noise_floor) continue;  // a line
    PlotPoint point{r.row.cache, KindOf(r.row.cache), r.stored_bits_at_32k, r.kl_p999, 0};
    if (mean) {
      point.value = r.kl.mean;
      point.error = r.kl.standard_error;
    }
    if (point.bits > 0) points.push_back(point);
  }
  return points;
}

double Floor(const EvalResults& results, bool mean) {
  for (const RowResult& r : results.rows) {
    if (r.row.noise_floor) return mean ? r.kl.mean : r.kl_p999;
  }
  return 0;
}

std::string Plots(const EvalResults& results) {
  return RateQualityPlot({"Mean divergence over size (bars: standard error over chunks)",
                          "mean KL to fp16, nats", Floor(results, true)},
                         Points(results, true)) +
         RateQualityPlot({"The worst positions: 99.9 % quantile of the divergence over size",
                          "99.9 % KL to fp16, nats", Floor(results, false)},
                         Points(results, false));
}

std::string ResultsTable(const EvalResults& results) {
  std::string html =
      "<div class=\"scroll\"><table>\n<tr><th>cache</th><th>code<br>bits</th><th>stored<br>bits"
      "</th><th>at 32k</th><th>exact</th><th>MiB</th><th>KL mean</th><th>±</th><th>median</th>"
      "<th>99.9 %</th><th>same<br>top, %</th><th>perplexity</th><th>±</th><th>difference</th>"
      "<th>prompt<br>tok/s</th><th>decode<br>tok/s</th></tr>\n";
  for (const RowResult& r : results.rows) {
    const CacheKind kind = KindOf(r.row.cache);
    html += fmt::format("<tr><td><svg class=\"key\" viewBox=\"0 0 14 14\">{}</svg>{}</td>",
                        Mark(kind, 7, 7), Escape(r.row.cache));
    for (const std::string& cell :
         {Number(r.code_bits, 2), Number(r.stored_bits, 2), Number(r.stored_bits_at_32k, 2),
          Number(r.exact_tokens, 0), Number(r.kv_mib, 2), Nats(r.kl.mean),
          Nats(r.kl.standard_error), Nats(r.kl_median), Nats(r.kl_p999), Number(100 * r.top1, 2),
          Number(r.ppl, 3), Number(r.ppl_se, 3), Number(r.ppl_diff, 4), Number(r.prompt_tok_s, 1),
          Number(r.decode_tok_s, 1)}) {
      html += "<td>" + cell + "</td>";
    }
    html += "</tr>\n";
  }
  return html + "</table></div>\n";
}

std::string Facts(const EvalPage& page) {
  std::string html = "<dl>\n";
  for (const auto& [name, value] : page.facts) {
    html += fmt::format("<dt>{}</dt><dd>{}</dd>\n", Escape(name), Escape(value));
  }
  return html + "</dl>\n<pre>" + Escape(page.command) + "</pre>\n";
}

// What the caches' short names stand for.
std::string Resolved(const EvalResults& results) {
  std::string html = "<h2>Caches, all options spelled out</h2>\n<ul class=\"small\">\n";
  for (const RowResult& r : results.rows) {
    html +=
        fmt::format("<li>{}: <code>{}</code></li>\n", Escape(r.row.cache), Escape(r.row.resolved));
  }
  return html + "</ul>\n";
}

}  // namespace

std::string HtmlTable(const std::vector<std::vector<std::string>>& rows) {
  std::string html = "<div class=\"scroll\"><table>\n";
  for (size_t r = 0; r < rows.size(); ++r) {
    const char* tag = r == 0 ? "th" : "td";
    html += "<tr>";
    for (const std::string& cell : rows[r]) {
      html += fmt::format("<{0}>{1}</{0}>", tag, Escape(cell));
    }
    html += "</tr>\n";
  }
  return html + "</table></div>\n";
}

std::string ToHtml(const EvalPage& page) {
  const std::string title = "Quality of KV caches: " + Escape(page.model);
  std::string html = "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  html += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
  html += "<title>" + title + "</title>\n<style>" + kStyle + "</style>\n</head>\n<body>\n";
  html += "<h1>" + title + "</h1>\n" + Facts(page);
  if (!page.results.rows.empty()) {
    html += "<h2>Quality over size</h2>\n" + Plots(page.results);
    html += "<h2>All figures</h2>\n" + ResultsTable(page.results);
    html += fmt::format("<p class=\"small\">{}</p>\n", kReading);
  }
  for (const std::string& section : page.sections) html += section;
  if (page.spectra) {
    html += "<h2>Spectra of K and V</h2>\n<div class=\"card\">" + ToSvg(*page.spectra) + "</div>\n";
  }
  if (!page.results.rows.empty()) html += Resolved(page.results);
  return html + "</body>\n</html>\n";
}

}  // namespace palu::app
