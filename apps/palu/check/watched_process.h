// File: watched_process.h - a command that runs beside this program until it ends or is stopped.
#ifndef PALU_APPS_CHECK_WATCHED_PROCESS_H_
#define PALU_APPS_CHECK_WATCHED_PROCESS_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace palu::app {

struct WatchedCommand {
  std::vector<std::string> words;                           // program and arguments, at least one
  std::vector<std::pair<std::string, std::string>> extras;  // environment, beside that of this one
  std::string output;  // file for standard output and standard error
};

class WatchedProcess {
 public:
  // Starts the command, found in PATH as a shell finds it, with no input. It and all that it starts
  // are one process group. Errors: StateError (it cannot be started; says why).
  explicit WatchedProcess(const WatchedCommand& command);
  // Stops it.
  ~WatchedProcess();
  WatchedProcess(const WatchedProcess&) = delete;
  WatchedProcess& operator=(const WatchedProcess&) = delete;

  // How it ended, once it has: its exit code, or 128 + the signal, as shells report it.
  std::optional<int> Ended();
  // Asks the whole group to end, and kills what is left after five seconds.
  void Stop();

 private:
  pid_t process_ = -1;
  std::optional<int> code_;
};

}  // namespace palu::app

#endif  // PALU_APPS_CHECK_WATCHED_PROCESS_H_
