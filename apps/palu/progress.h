// File: progress.h - a line on stderr that tells how far the prompt is; on a terminal only.
#ifndef PALU_APPS_PROGRESS_H_
#define PALU_APPS_PROGRESS_H_

#include <cstdint>
#include <string>

#include "measure.h"

namespace palu::app {

// "40 s", "12 min", "3 h 5 min": rounded up.
std::string DurationText(double seconds);

// What is counted: tokens, which have a speed, or parts of a whole, of which a share is shown.
enum class ProgressUnit { kTokens, kShare };

// One line of at most `width` columns: label, bar, count and speed or share, time left.
std::string ProgressLine(const std::string& label, int64_t done, int64_t total, double seconds,
                         int width, ProgressUnit unit = ProgressUnit::kTokens);

// Draws on construction and at an Update, a few times a second, and wipes the line at the end.
class Progress {
 public:
  Progress(std::string label, int64_t total, ProgressUnit unit = ProgressUnit::kTokens);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Update(int64_t done);
  // From the next Update on.
  void SetLabel(std::string label);

 private:
  std::string label_;
  int64_t total_;
  ProgressUnit unit_;
  bool on_;
  Timer timer_;
  double drawn_ = -1;  // seconds
};

// A short note ("loading the model") that goes away at the end of its scope.
class Note {
 public:
  explicit Note(const std::string& text);
  ~Note();
  Note(const Note&) = delete;
  Note& operator=(const Note&) = delete;

 private:
  bool on_;
};

}  // namespace palu::app

#endif  // PALU_APPS_PROGRESS_H_
