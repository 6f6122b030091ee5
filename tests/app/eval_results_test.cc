#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "eval/results.h"

namespace palu::app {
namespace {

// A cell whose every position says the same.
Cell MakeCell(float kl, float nll, double seconds = 1) {
  Cell cell;
  cell.kl.assign(100, kl);
  cell.nll.assign(100, nll);
  cell.same_top.assign(100, 1);
  cell.size = {4, 5, 4.5, 95, int64_t{2} << 20};
  cell.prompt_tokens = cell.scored_tokens = 100;
  cell.prompt_seconds = seconds;
  cell.scored_seconds = 2 * seconds;
  return cell;
}

const EvalRow kA{"a", "a:resolved", false}, kB{"b", "b:resolved", false};

CellMap TwoChunks() {
  CellMap cells;
  cells[{"a:resolved", 0}] = MakeCell(0.1f, 2);
  cells[{"a:resolved", 1}] = MakeCell(0.3f, 3, 3);
  cells[{kReferenceCell, 0}].nll.assign(100, 2);
  cells[{kReferenceCell, 1}].nll.assign(100, 2);
  return cells;
}

TEST(Results, AreMeansOverChunksWithTheirErrors) {
  CellMap cells = TwoChunks();
  cells[{"a:resolved", 1}].kl[0] = 9;
  cells[{"a:resolved", 1}].same_top[0] = 0;
  const EvalResults results = SumUp({kA}, cells, 2);
  ASSERT_EQ(results.rows.size(), 1u);
  EXPECT_EQ(results.chunks, 2);
  const RowResult& r = results.rows[0];
  const double second = (99 * 0.3 + 9) / 100;
  EXPECT_NEAR(r.kl.mean, (0.1 + second) / 2, 1e-6);
  EXPECT_NEAR(r.kl.standard_error, (second - 0.1) / 2, 1e-6);
  EXPECT_NEAR(r.kl_median, 0.3, 1e-6);
  EXPECT_NEAR(r.kl_p999, 9, 1e-6);
  EXPECT_DOUBLE_EQ(r.top1, 199 / 200.0);
  EXPECT_NEAR(r.ppl, std::exp(2.5), 1e-6);
  EXPECT_NEAR(r.ppl_se, std::exp(2.5) * 0.5, 1e-6);
  EXPECT_NEAR(r.ppl_diff, std::exp(2.5) - std::exp(2), 1e-6);
  EXPECT_DOUBLE_EQ(r.prompt_tok_s, 200 / 4.0);
  EXPECT_DOUBLE_EQ(r.decode_tok_s, 200 / 8.0);
  EXPECT_DOUBLE_EQ(r.code_bits, 4);
  EXPECT_DOUBLE_EQ(r.stored_bits, 5);
  EXPECT_DOUBLE_EQ(r.stored_bits_at_32k, 4.5);
  EXPECT_DOUBLE_EQ(r.exact_tokens, 95);
  EXPECT_DOUBLE_EQ(r.kv_mib, 2);
}

TEST(Results, OfOneChunkHaveNoError) {
  const EvalResults results = SumUp({kA}, TwoChunks(), 1);
  EXPECT_TRUE(std::isnan(results.rows.at(0).kl.standard_error));
  EXPECT_TRUE(ToJson(results).at(0).at("kl_mean_se").is_number_float());
  EXPECT_EQ(nlohmann::json::parse(ToJson(results).dump()).at(0).at("kl_mean_se"), nullptr);
  EXPECT_NE(ToTable(results).find(" - "), std::string::npos);
}

TEST(Results, CompareRowsOnTheChunksThatAllHave) {
  CellMap cells = TwoChunks();
  cells[{"b:resolved", 1}] = MakeCell(0.5f, 2);
  const EvalResults results = SumUp({kA, kB}, cells, 2);
  EXPECT_EQ(results.chunks, 1);
  ASSERT_EQ(results.rows.size(), 2u);
  EXPECT_NEAR(results.rows[0].kl.mean, 0.3, 1e-6);
  EXPECT_NEAR(results.rows[1].kl.mean, 0.5, 1e-6);
}

TEST(Results, LeaveOutRowsWithoutACell) {
  const EvalResults results = SumUp({kA, kB}, TwoChunks(), 2);
  EXPECT_EQ(results.chunks, 2);
  ASSERT_EQ(results.rows.size(), 1u);
  ASSERT_EQ(results.unmeasured.size(), 1u);
  EXPECT_EQ(results.unmeasured[0].cache, "b");
  const EvalResults none = SumUp({kA}, {}, 2);
  EXPECT_TRUE(none.rows.empty());
  EXPECT_EQ(none.unmeasured.size(), 1u);
}

TEST(Results, JsonHasTheAgreedFieldsInOrder) {
  std::vector<std::string> fields;
  const nlohmann::ordered_json json = ToJson(SumUp({kA}, TwoChunks(), 2));
  for (auto field = json.at(0).begin(); field != json.at(0).end(); ++field) {
    fields.push_back(field.key());
  }
  EXPECT_EQ(fields, (std::vector<std::string>{
                        "cache", "code_bits", "stored_bits_per_element", "stored_bits_at_32k",
                        "exact_tokens", "kv_mib", "kl_mean", "kl_mean_se", "kl_median", "kl_p999",
                        "top1", "ppl", "ppl_se", "ppl_diff", "prompt_tok_s", "decode_tok_s"}));
}

TEST(Results, TableColumnsLineUp) {
  CellMap cells = TwoChunks();
  const EvalRow longer{"palu:bits=auto:3,key_fit=prompt", "b:resolved", false};
  cells[{"b:resolved", 0}] = MakeCell(12.5f, 6);
  cells[{"b:resolved", 1}] = MakeCell(12.25f, 6);
  const std::string table = ToTable(SumUp({kA, longer}, cells, 2));
  std::vector<size_t> lengths;
  for (size_t at = 0; at < table.size();) {
    const size_t end = table.find('\n', at);
    lengths.push_back(end - at);
    at = end + 1;
  }
  ASSERT_EQ(lengths.size(), 3u) << table;
  EXPECT_EQ(lengths[0], lengths[1]) << table;
  EXPECT_EQ(lengths[0], lengths[2]) << table;
}

}  // namespace
}  // namespace palu::app
