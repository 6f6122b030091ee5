#include "llama/log.h"

#include <llama.h>

#include <mutex>

namespace palu::llama {
namespace {

constexpr size_t kMaxErrorText = 2000;

thread_local std::string error_text;
thread_local bool continues_error = false;

void OnLog(ggml_log_level level, const char* text, void*) {
  // A CONT message belongs to the one before it.
  const bool is_error =
      level == GGML_LOG_LEVEL_ERROR || (level == GGML_LOG_LEVEL_CONT && continues_error);
  continues_error = is_error;
  if (is_error && error_text.size() < kMaxErrorText) error_text += text;
}

}  // namespace

void SilenceLog() {
  static std::once_flag once;
  std::call_once(once, [] { llama_log_set(OnLog, nullptr); });
}

ErrorLog::ErrorLog() {
  SilenceLog();
  error_text.clear();
}

std::string ErrorLog::text() const {
  std::string line;
  for (const char c : error_text) line += c == '\n' ? ';' : c;
  while (!line.empty() && (line.back() == ';' || line.back() == ' ')) line.pop_back();
  return line;
}

std::string ErrorLog::suffix() const {
  const std::string line = text();
  return line.empty() ? "" : ": " + line;
}

}  // namespace palu::llama
