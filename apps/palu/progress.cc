#include "progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace palu::app {
namespace {

int TerminalWidth() {
  winsize size{};
  const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

void Wipe() { fmt::print(stderr, "\r\x1b[K"); }

}  // namespace

std::string ProgressLine(const std::string& label, int64_t done, int64_t total, double seconds,
                         int width) {
  std::string tail = fmt::format(" {}/{} tokens", done, total);
  if (const double rate = Rate(done, seconds); rate > 0) {
    tail += fmt::format("  {:.0f} tok/s  {:.0f} s left", rate, std::ceil((total - done) / rate));
  }
  const int room = width - static_cast<int>(label.size() + tail.size()) - 4;
  std::string line = label;
  if (room >= 5) {
    const int cells = std::min(room, 40);
    const int full = total > 0 ? static_cast<int>(cells * done / total) : cells;
    line += fmt::format(" [{}{}]", std::string(full, '#'), std::string(cells - full, '.'));
  }
  // The last column stays free: some terminals wrap when it is written.
  return (line + tail).substr(0, std::max(0, width - 1));
}

Progress::Progress(std::string label, int64_t total)
    : label_(std::move(label)), total_(total), on_(isatty(STDERR_FILENO)) {
  Update(0);
}

Progress::~Progress() {
  if (on_) Wipe();
}

void Progress::Update(int64_t done) {
  if (!on_) return;
  Wipe();
  fmt::print(stderr, "{}", ProgressLine(label_, done, total_, timer_.Seconds(), TerminalWidth()));
  std::fflush(stderr);
}

Note::Note(const std::string& text) : on_(isatty(STDERR_FILENO)) {
  if (!on_) return;
  fmt::print(stderr, "{}...", text);
  std::fflush(stderr);
}

Note::~Note() {
  if (on_) Wipe();
}

}  // namespace palu::app
