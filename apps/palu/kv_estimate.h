// File: kv_estimate.h - what a KV cache will take, before there is one.
#ifndef PALU_APPS_KV_ESTIMATE_H_
#define PALU_APPS_KV_ESTIMATE_H_

#include <cstdint>
#include <string>

#include "palu/builder.h"

namespace palu::app {

// Bytes of the caches of all layers after `tokens` tokens, for a cache text such as "fp16",
// "palu:bits=auto:3" or "llama:q8_0". Low rather than high: where only the data decides (a rank by
// the energy rule, page slack), the least is taken, so that nothing that fits is refused; the
// cache's own limit stops what the estimate let pass. Throws ConfigError.
int64_t EstimateKvBytes(const ModelShape& shape, const std::string& cache, int64_t tokens);

}  // namespace palu::app

#endif  // PALU_APPS_KV_ESTIMATE_H_
