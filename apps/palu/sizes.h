// File: sizes.h - byte counts as people write them.
#ifndef PALU_APPS_SIZES_H_
#define PALU_APPS_SIZES_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace palu::app {

// "200M", "1.5G", "64KiB", "4096": a decimal number and an optional K, M, G or T, powers of 1024,
// with or without "B" or "iB" after it, in either case. Throws ConfigError.
int64_t ParseSize(std::string_view text);

// "95.6 MiB"; bytes below 1 KiB as "512 B".
std::string FormatBytes(int64_t bytes);

}  // namespace palu::app

#endif  // PALU_APPS_SIZES_H_
