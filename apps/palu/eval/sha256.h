// File: sha256.h - SHA-256 of texts and files, to tell them apart.
#ifndef PALU_APPS_EVAL_SHA256_H_
#define PALU_APPS_EVAL_SHA256_H_

#include <string>
#include <string_view>

namespace palu::app {

// 64 lower-case hexadecimal digits.
std::string Sha256Of(std::string_view bytes);
// Of a whole file, read in pieces. Errors: FormatError.
std::string Sha256OfFile(const std::string& path);

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_SHA256_H_
