#include "bench/self_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "interrupt.h"
#include "palu/errors.h"

extern char** environ;

namespace palu::app {
namespace {

// Where the running program is. A program that was replaced while it runs is still there.
std::string ProgramPath() {
  constexpr char kLink[] = "/proc/self/exe";
  std::error_code error;
  if (std::filesystem::exists(kLink, error)) return kLink;
  return "palu";  // of PATH
}

struct Pipe {
  int read_end = -1, write_end = -1;

  Pipe() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
      throw StateError(fmt::format("cannot open a pipe: {}", std::strerror(errno)));
    }
    read_end = ends[0];
    write_end = ends[1];
  }
  ~Pipe() {
    close(read_end);
    CloseWriteEnd();
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void CloseWriteEnd() {
    if (write_end >= 0) close(write_end);
    write_end = -1;
  }
};

pid_t Start(const std::vector<std::string>& arguments, int standard_output) {
  std::vector<char*> words = {const_cast<char*>("palu")};
  for (const std::string& word : arguments) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, standard_output, STDOUT_FILENO);
  pid_t child = -1;
  const int error =
      posix_spawnp(&child, ProgramPath().c_str(), &actions, nullptr, words.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    throw StateError(fmt::format("cannot start {}: {}", ProgramPath(), std::strerror(error)));
  }
  return child;
}

// Until the process closes it. After Ctrl-C the process is stopped: a terminal tells both of us,
// but others may have told only this one.
std::string ReadAll(int descriptor, pid_t child) {
  constexpr int kPatience = 500;  // ms; seldom enough not to disturb what is measured
  std::string text;
  char bytes[4096];
  for (;;) {
    pollfd poll_in = {descriptor, POLLIN, 0};
    const int ready = poll(&poll_in, 1, kPatience);
    if (Interrupted()) kill(child, SIGINT);
    if (ready <= 0) continue;
    const ssize_t n = read(descriptor, bytes, sizeof bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return text;
    text.append(bytes, n);
  }
}

}  // namespace

SelfResult RunSelf(const std::vector<std::string>& arguments) {
  Pipe pipe;
  const pid_t child = Start(arguments, pipe.write_end);
  pipe.CloseWriteEnd();
  SelfResult result;
  result.out = ReadAll(pipe.read_end, child);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

}  // namespace palu::app
