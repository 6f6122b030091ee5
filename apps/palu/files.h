// File: files.h - texts in, reports out, with errors that name the file and the reason.
#ifndef PALU_APPS_FILES_H_
#define PALU_APPS_FILES_H_

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace palu::app {

// A whole UTF-8 file; "-" is standard input. A byte order mark is dropped.
// Errors: FormatError (cannot be read), InputError (not UTF-8; says at which byte).
std::string ReadText(const std::string& path);

// Throws InputError when `text` is not UTF-8; `what` names it in the message.
void RequireUtf8(std::string_view text, std::string_view what);

// Throws FormatError when WriteFile(path) could not open the file. Changes nothing. Meant for
// before a long computation.
void CheckWritable(const std::string& path);

// Replaces the file. Throws FormatError, and removes what was written, when anything fails,
// including a full disk found at close.
void WriteFile(const std::string& path, std::string_view contents);

// Writes a JSON object, one field a line. File names need not be UTF-8: what is not becomes U+FFFD.
void WriteJson(const std::string& path, const nlohmann::ordered_json& json);

// Writes everything to a descriptor, also when signals interrupt. Throws FormatError; `what` names
// the descriptor.
void WriteAll(int descriptor, std::string_view bytes, std::string_view what);

}  // namespace palu::app

#endif  // PALU_APPS_FILES_H_
