// File: progress.h - a line on stderr that tells how far the prompt is; on a terminal only.
#ifndef PALU_APPS_PROGRESS_H_
#define PALU_APPS_PROGRESS_H_

#include <cstdint>
#include <string>

#include "measure.h"

namespace palu::app {

// One line of at most `width` columns: label, bar, count, speed, time left.
std::string ProgressLine(const std::string& label, int64_t done, int64_t total, double seconds,
                         int width);

// Draws on construction and at each Update, and wipes the line at the end.
class Progress {
 public:
  Progress(std::string label, int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Update(int64_t done);

 private:
  std::string label_;
  int64_t total_;
  bool on_;
  Timer timer_;
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
