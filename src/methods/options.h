// File: options.h - the options of a cache as a table: key, meaning, allowed values, how to read
// and write each.
#ifndef PALU_SRC_METHODS_OPTIONS_H_
#define PALU_SRC_METHODS_OPTIONS_H_

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "palu/config.h"

namespace palu {

// One option. `set` reads a text into the config and throws through Refuse; `get` writes it back.
struct Option {
  const char* key;
  const char* meaning;
  const char* allowed;
  std::function<void(const Option&, KVCacheConfig&, std::string_view)> set;
  std::function<std::string(const KVCacheConfig&)> get;
};

const std::vector<Option>& Options();
// Throws ConfigError for an unknown key.
const Option& FindOption(std::string_view key);
// Throws ConfigError: `option` cannot be `value`.
[[noreturn]] void Refuse(std::string_view option, std::string_view value, std::string_view allowed);

}  // namespace palu

#endif  // PALU_SRC_METHODS_OPTIONS_H_
