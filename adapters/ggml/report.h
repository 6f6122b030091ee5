// File: report.h - what the plug-in says, and to whom. Silent non-use is the worst fault of a
// plug-in, so it names itself when it is loaded, when it gets a cache and when one goes.
#ifndef PALU_ADAPTERS_GGML_REPORT_H_
#define PALU_ADAPTERS_GGML_REPORT_H_

#include <string>
#include <string_view>

namespace palu::ggml {

struct KvReport;  // kv_buffer.h

// One line on stderr: "palu: text".
void Say(const std::string& text);

// For `palu check-plugin`: appends "event text" to the file that PALU_REPORT names, if it does.
// Events: loaded, refused, reserved (layers have their cache here), cache (its first row came: bits
// per element), used (attention ran).
void Tell(std::string_view event, const std::string& text);

// Says why the program cannot go on with palu, and ends it: what comes after would be another cache
// than the one that was asked for, or a wrong answer.
[[noreturn]] void Refuse(const std::string& text);

// Prints the totals of all caches at SIGUSR1, if nobody else handles that signal.
void InstallSummarySignal();
// What a cache holds and what it takes, for one line.
std::string Describe(const KvReport& report);

}  // namespace palu::ggml

#endif  // PALU_ADAPTERS_GGML_REPORT_H_
