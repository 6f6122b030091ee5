// File: log.h - llama.cpp's log, kept off the terminal.
#ifndef PALU_ADAPTERS_LLAMA_LOG_H_
#define PALU_ADAPTERS_LLAMA_LOG_H_

#include <string>

namespace palu::llama {

// Routes the log of llama.cpp and ggml, which is one per process, into a buffer per thread that
// keeps errors only. Safe to call often and from any thread.
void SilenceLog();

// Collects what this thread's calls into llama.cpp report as errors, from its construction on.
class ErrorLog {
 public:
  ErrorLog();
  // One line, "" when nothing was reported.
  std::string text() const;
  // ": " and the text, or "".
  std::string suffix() const;
};

}  // namespace palu::llama

#endif  // PALU_ADAPTERS_LLAMA_LOG_H_
