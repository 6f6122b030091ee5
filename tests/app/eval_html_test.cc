#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <regex>
#include <string>
#include <vector>

#include "eval/html.h"
#include "eval/plot.h"
#include "markup.h"
#include "svg.h"

namespace palu::app {
namespace {

const std::vector<std::string> kUnclosed = {"meta", "br", "!doctype"};

RowResult Row(const std::string& cache, double bits, double kl, double tail) {
  RowResult r;
  r.row = {cache, cache + ",all=options", cache == "fp16"};
  r.code_bits = bits - 0.3;
  r.stored_bits = bits + 0.4;
  r.stored_bits_at_32k = bits;
  r.exact_tokens = 95;
  r.kv_mib = 29.8;
  r.kl = {kl, kl / 10};
  r.kl_median = kl / 3;
  r.kl_p999 = tail;
  r.top1 = 0.951;
  r.ppl = 16.7;
  r.ppl_se = 0.4;
  r.ppl_diff = 0.1;
  r.prompt_tok_s = 190;
  r.decode_tok_s = 120;
  return r;
}

// As crowded as a real report.
EvalPage SamplePage() {
  EvalPage page;
  page.model = "a<b>&\"c\".gguf";
  page.command = "palu eval -m a<b>.gguf --cache palu";
  page.facts = {{"text", "wiki & more"}};
  page.results.chunks = 20;
  page.results.rows = {Row("fp16", 16, 0.0031, 0.06),
                       Row("llama:f16", 16, 0.0034, 0.07),
                       Row("llama:q8_0", 8.5, 0.0039, 0.07),
                       Row("llama:q8_0/q4_0", 6.5, 0.021, 0.9),
                       Row("llama:q4_0", 4.5, 0.053, 2.29),
                       Row("kivi:bits=4", 4.6, 0.012, 0.3),
                       Row("kivi:bits=2", 2.6, 0.31, 5),
                       Row("svdq", 9.4, 0.6, 8),
                       Row("rabitq", 9.1, 0.9, 9),
                       Row("uniform:bits=4", 4.6, 0.015, 0.35),
                       Row("palu:reference", 2.7, 0.96, 7.87),
                       Row("palu", 4.05, 0.011, 0.29),
                       Row("palu:quality", 6.1, 0.0042, 0.08),
                       Row("palu:small", 3.05, 0.037, 0.89),
                       Row("palu:bits=auto:3,key_fit=prompt", 3.06, 0.070, 1.16),
                       Row("palu:scales=minmax,group_size=128", 4.04, 0.0085, 0.18),
                       Row("palu:bits=auto:4,recent_tokens=128,group_size=64", 4.1, 0.0095, 0.2)};
  return page;
}

TEST(EvalHtml, IsOneFileThatNeedsNothingElse) {
  const std::string html = ToHtml(SamplePage());
  ExpectWellFormed(html, kUnclosed);
  for (const char* part : {"<script", "href=", "src=", "url(", "@import", "nan", "inf<"}) {
    EXPECT_EQ(html.find(part), std::string::npos) << part;
  }
  EXPECT_NE(html.find("prefers-color-scheme: dark"), std::string::npos);
}

TEST(EvalHtml, EscapesWhatItShows) {
  const std::string html = ToHtml(SamplePage());
  EXPECT_NE(html.find("a&lt;b&gt;&amp;&quot;c&quot;.gguf"), std::string::npos);
  EXPECT_EQ(html.find("a<b>"), std::string::npos);
  EXPECT_EQ(Escape("<&\">\n"), "&lt;&amp;&quot;&gt; ");
}

TEST(EvalHtml, ShowsEveryRowInTheTableAndInBothPlots) {
  const EvalPage page = SamplePage();
  const std::string html = ToHtml(page);
  for (const RowResult& r : page.results.rows) {
    // Table, list of options, and two points; the noise floor is a line.
    const size_t points = r.row.noise_floor ? 0 : 2;
    EXPECT_EQ(CountOf(html, "<title>" + r.row.cache + ": "), points) << r.row.cache;
    EXPECT_NE(html.find("</svg>" + r.row.cache + "</td>"), std::string::npos) << r.row.cache;
    EXPECT_NE(html.find("<code>" + r.row.resolved + "</code>"), std::string::npos);
  }
  EXPECT_EQ(CountOf(html, "noise floor (fp16"), 2u);
}

TEST(EvalHtml, UnknownErrorsAreDashes) {
  EvalPage page = SamplePage();
  for (RowResult& r : page.results.rows) {
    r.kl.standard_error = r.ppl_se = std::numeric_limits<double>::quiet_NaN();
  }
  const std::string html = ToHtml(page);
  EXPECT_EQ(html.find("nan"), std::string::npos);
  EXPECT_NE(html.find("<td>–</td>"), std::string::npos);
  EXPECT_EQ(CountOf(html, "class=\"bar\""), 0u);
}

TEST(EvalHtml, WithoutResultsHasNoPlot) {
  EvalPage page = SamplePage();
  page.results = {};
  page.sections = {HtmlTable({{"a", "b"}, {"1", "<2>"}})};
  const std::string html = ToHtml(page);
  ExpectWellFormed(html, kUnclosed);
  EXPECT_EQ(CountOf(html, "<svg"), 0u);
  EXPECT_NE(html.find("<td>&lt;2&gt;</td>"), std::string::npos);
}

struct Label {
  double x, y, width;
  std::string text;
};

std::vector<Label> Labels(const std::string& svg) {
  std::vector<Label> labels;
  const std::regex pattern(R"re(<text x="([0-9.]+)" y="([0-9.]+)" class="label">([^<]*)</text>)re");
  for (std::sregex_iterator it(svg.begin(), svg.end(), pattern), end; it != end; ++it) {
    const std::string text = (*it)[3];
    labels.push_back({std::stod((*it)[1]), std::stod((*it)[2]), 7.0 * text.size(), text});
  }
  return labels;
}

TEST(RateQualityPlot, LabelsDoNotHideEachOther) {
  std::vector<PlotPoint> points;
  for (const RowResult& r : SamplePage().results.rows) {
    points.push_back({r.row.cache, KindOf(r.row.cache), r.stored_bits_at_32k, r.kl.mean, 0});
  }
  const std::vector<Label> labels = Labels(RateQualityPlot({"t", "y", 0.003}, points));
  EXPECT_EQ(labels.size(), points.size()) << "some found no place";
  for (size_t i = 0; i < labels.size(); ++i) {
    const Label& a = labels[i];
    EXPECT_GT(a.x, 70);
    EXPECT_LT(a.x + a.width, 1000) << a.text;
    for (size_t j = i + 1; j < labels.size(); ++j) {
      const Label& b = labels[j];
      const bool apart = a.x + a.width < b.x || b.x + b.width < a.x || std::abs(a.y - b.y) > 11;
      EXPECT_TRUE(apart) << a.text << " and " << b.text;
    }
  }
}

TEST(RateQualityPlot, ManyEqualPointsStillFitThePlot) {
  const std::vector<PlotPoint> points(200, {"the same place", CacheKind::kPalu, 4, 0.01, 0.002});
  const std::string svg = RateQualityPlot({"t", "y", 0}, points);
  EXPECT_EQ(CountOf(svg, "<circle"), 201u);  // and the legend
  EXPECT_LT(Labels(svg).size(), 200u);
}

TEST(RateQualityPlot, DivergencesOfZeroStandAtTheLowerEdge) {
  const std::string svg = RateQualityPlot({"t", "y", 0}, {{"a", CacheKind::kPalu, 4, 0, 0}});
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_NE(svg.find("cy=\"484.0\""), std::string::npos) << svg;
}

TEST(KindOfCache, IsToldByTheMethod) {
  EXPECT_EQ(KindOf("palu"), CacheKind::kPalu);
  EXPECT_EQ(KindOf("palu:bits=auto:3"), CacheKind::kPalu);
  EXPECT_EQ(KindOf("llama:q8_0/q4_0,fa=on"), CacheKind::kLlama);
  EXPECT_EQ(KindOf("fp16"), CacheKind::kExact);
  EXPECT_EQ(KindOf("kivi,recent_tokens=64"), CacheKind::kSibling);
}

}  // namespace
}  // namespace palu::app
