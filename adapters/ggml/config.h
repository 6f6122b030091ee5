// File: config.h - PALU_CACHE, read once when the plug-in is loaded.
#ifndef PALU_ADAPTERS_GGML_CONFIG_H_
#define PALU_ADAPTERS_GGML_CONFIG_H_

#include "palu/config.h"

namespace palu::ggml {

// The cache that PALU_CACHE names; unset means "palu". Throws ConfigError.
const KVCacheConfig& CacheConfig();

}  // namespace palu::ggml

#endif  // PALU_ADAPTERS_GGML_CONFIG_H_
