// File: program.h - runs the program palu as a shell would.
#ifndef PALU_TESTS_APP_PROGRAM_H_
#define PALU_TESTS_APP_PROGRAM_H_

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace palu::app {

// A folder that is removed at the end.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  std::string Path(const std::string& name) const { return (path_ / name).string(); }
  void Put(const std::string& name, const std::string& bytes) const;
  std::string Get(const std::string& name) const;

 private:
  std::filesystem::path path_;
};

struct Outcome {
  int code = -1;  // exit code, or -signal
  std::string out, err;
};

struct Invocation {
  std::vector<std::string> arguments;
  std::string input;  // of standard input
  std::vector<std::pair<std::string, std::string>> environment;
  std::string out_file;  // instead of catching standard output
  // Called over and over while the program runs, with its id and what it has written so far.
  std::function<void(pid_t, const std::string& out)> watch;
};

// Runs the built program to its end. A program that takes over two minutes is killed.
Outcome Palu(const Invocation& invocation);
Outcome Palu(std::vector<std::string> arguments, std::string input = "");

// What to type when the screen shows something new.
struct Step {
  std::string wait_for, type;
};

// Whether this system can open pseudo-terminals; a bare chroot without /dev/pts cannot.
bool HasTerminals();

// Runs the program on a terminal of 80 columns. `out` is everything that it showed.
Outcome PaluOnTerminal(const std::vector<std::string>& arguments, std::vector<Step> steps);

}  // namespace palu::app

#endif  // PALU_TESTS_APP_PROGRAM_H_
