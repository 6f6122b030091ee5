#include "ggml/report.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "ggml/kv_buffer.h"

namespace palu::ggml {
namespace {

int wake_pipe[2] = {-1, -1};

void OnSignal(int) {
  const char byte = 0;
  [[maybe_unused]] const ssize_t written = write(wake_pipe[1], &byte, 1);
}

std::string Mib(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

}  // namespace

void Say(const std::string& text) {
  std::fprintf(stderr, "palu: %s\n", text.c_str());
  std::fflush(stderr);
}

void Tell(std::string_view event, const std::string& text) {
  const char* const path = std::getenv("PALU_REPORT");
  if (path == nullptr || *path == 0) return;
  const int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return;
  const std::string line = std::string(event) + " " + text + "\n";
  [[maybe_unused]] const ssize_t written = write(file, line.data(), line.size());
  close(file);
}

void Refuse(const std::string& text) {
  Say(text);
  Tell("refused", text);
  // No destructors: other threads may be at work.
  std::_Exit(1);
}

std::string Describe(const KvReport& r) {
  return std::to_string(r.layers) + " layers, " + std::to_string(r.streams) + " x " +
         std::to_string(r.cells) + " cells, " + std::to_string(r.tokens) +
         " in use: " + Mib(r.bytes) + " now, " + Mib(r.peak_bytes) + " at most; as f16 " +
         Mib(r.fp16_bytes);
}

namespace {

void SaySummary() {
  const std::vector<KvReport> reports = AllReports();
  if (reports.empty()) Say("no cache in use");
  for (const KvReport& report : reports) Say(Describe(report));
}

}  // namespace

void InstallSummarySignal() {
  struct sigaction now = {};
  if (sigaction(SIGUSR1, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return;
  if (pipe2(wake_pipe, O_CLOEXEC) != 0) return;
  // A handler may not print; this thread sleeps until one wakes it.
  std::thread([] {
    char byte;
    while (true) {
      const ssize_t n = read(wake_pipe[0], &byte, 1);
      if (n == 1) SaySummary();
      if (n == 0) return;
    }
  }).detach();
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);
}

}  // namespace palu::ggml
