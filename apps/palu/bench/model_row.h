// File: model_row.h - speed and memory of one cache in a whole model at one depth.
#ifndef PALU_APPS_BENCH_MODEL_ROW_H_
#define PALU_APPS_BENCH_MODEL_ROW_H_

#include <cstdint>
#include <nlohmann/json.hpp>

namespace palu::app {

// One run.
struct ModelSample {
  double prompt_tok_s = 0, decode_tok_s = 0;  // 0 = not measured
  int64_t peak_rss_bytes = 0;  // of the process once the depth was filled, model included
};

nlohmann::ordered_json ToJson(const ModelSample& sample);
// Errors: FormatError.
ModelSample ModelSampleFrom(const std::string& json);

}  // namespace palu::app

#endif  // PALU_APPS_BENCH_MODEL_ROW_H_
