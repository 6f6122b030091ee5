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

std::string DurationText(double seconds) {
  const auto whole = static_cast<int64_t>(std::ceil(seconds));
  if (whole < 120) return fmt::format("{} s", whole);
  const int64_t minutes = (whole + 59) / 60;
  if (minutes < 120) return fmt::format("{} min", minutes);
  return fmt::format("{} h {} min", minutes / 60, minutes % 60);
}

std::string ProgressLine(const std::string& label, int64_t done, int64_t total, double seconds,
                         int width, ProgressUnit unit) {
  const double rate = Rate(done, seconds);
  std::string tail;
  if (unit == ProgressUnit::kTokens) {
    tail = fmt::format(" {}/{} tokens", done, total);
    if (rate > 0) tail += fmt::format("  {:.0f} tok/s", rate);
  } else {
    tail = fmt::format(" {} %", total > 0 ? 100 * done / total : 100);
  }
  if (rate > 0) {
    tail += fmt::format("  {} left", DurationText(static_cast<double>(total - done) / rate));
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

Progress::Progress(std::string label, int64_t total, ProgressUnit unit)
    : label_(std::move(label)), total_(total), unit_(unit), on_(isatty(STDERR_FILENO)) {
  Update(0);
}

Progress::~Progress() {
  if (on_) Wipe();
}

void Progress::Update(int64_t done) {
  constexpr double kInterval = 0.1;
  const double now = timer_.Seconds();
  if (!on_ || (drawn_ >= 0 && now - drawn_ < kInterval && done < total_)) return;
  drawn_ = now;
  Wipe();
  fmt::print(stderr, "{}", ProgressLine(label_, done, total_, now, TerminalWidth(), unit_));
  std::fflush(stderr);
}

void Progress::SetLabel(std::string label) { label_ = std::move(label); }

Note::Note(const std::string& text) : on_(isatty(STDERR_FILENO)) {
  if (!on_) return;
  fmt::print(stderr, "{}...", text);
  std::fflush(stderr);
}

Note::~Note() {
  if (on_) Wipe();
}

}  // namespace palu::app
