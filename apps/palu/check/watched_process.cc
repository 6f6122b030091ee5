#include "check/watched_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string_view>
#include <thread>

#include "palu/errors.h"

extern char** environ;

namespace palu::app {
namespace {

// The environment of this program, with `extras` instead of what has their names.
std::vector<std::string> Environment(
    const std::vector<std::pair<std::string, std::string>>& extras) {
  std::vector<std::string> entries;
  for (const auto& [name, value] : extras) entries.push_back(fmt::format("{}={}", name, value));
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    bool replaced = false;
    for (const auto& [name, value] : extras) replaced |= text.starts_with(name + "=");
    if (!replaced) entries.emplace_back(text);
  }
  return entries;
}

std::vector<char*> Pointers(const std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (const std::string& word : words) pointers.push_back(const_cast<char*>(word.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

// A group of its own, with no signal ignored or blocked that this program ignores or blocks.
class Attributes {
 public:
  Attributes() {
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawnattr_init(&attributes_);
    posix_spawnattr_setflags(
        &attributes_, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setpgroup(&attributes_, 0);
    posix_spawnattr_setsigmask(&attributes_, &none);
    posix_spawnattr_setsigdefault(&attributes_, &all);
  }
  ~Attributes() { posix_spawnattr_destroy(&attributes_); }
  Attributes(const Attributes&) = delete;
  Attributes& operator=(const Attributes&) = delete;
  const posix_spawnattr_t* get() const { return &attributes_; }

 private:
  posix_spawnattr_t attributes_;
};

}  // namespace

WatchedProcess::WatchedProcess(const WatchedCommand& command) {
  const std::vector<std::string> environment = Environment(command.extras);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, command.output.c_str(),
                                   O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&files, STDOUT_FILENO, STDERR_FILENO);
  const Attributes attributes;
  const int error = posix_spawnp(&process_, command.words[0].c_str(), &files, attributes.get(),
                                 Pointers(command.words).data(), Pointers(environment).data());
  posix_spawn_file_actions_destroy(&files);
  if (error != 0) {
    throw StateError(fmt::format("cannot start {}: {}", command.words[0], std::strerror(error)));
  }
}

WatchedProcess::~WatchedProcess() { Stop(); }

std::optional<int> WatchedProcess::Ended() {
  int status = 0;
  if (!code_ && waitpid(process_, &status, WNOHANG) == process_) {
    code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  return code_;
}

void WatchedProcess::Stop() {
  using Clock = std::chrono::steady_clock;
  // A program that a script has started may outlive the script.
  kill(-process_, SIGTERM);
  const auto limit = Clock::now() + std::chrono::seconds(5);
  while ((!Ended() || kill(-process_, 0) == 0) && Clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  kill(-process_, SIGKILL);
  while (!Ended()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

}  // namespace palu::app
