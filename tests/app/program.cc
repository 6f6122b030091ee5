#include "program.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace palu::app {
namespace {

namespace fs = std::filesystem;

void Redirect(const std::string& path, int flags, int descriptor) {
  const int file = open(path.c_str(), flags, 0600);
  if (file < 0 || dup2(file, descriptor) < 0) _exit(126);
  close(file);
}

[[noreturn]] void ExecPalu(const std::vector<std::string>& words) {
  std::vector<char*> arguments = {const_cast<char*>("palu")};
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  execv(PALU_PROGRAM, arguments.data());
  _exit(127);
}

[[noreturn]] void Exec(const Invocation& call, const std::string& in, const std::string& out,
                       const std::string& err) {
  Redirect(in, O_RDONLY, STDIN_FILENO);
  Redirect(out, O_WRONLY | O_CREAT | O_TRUNC, STDOUT_FILENO);
  Redirect(err, O_WRONLY | O_CREAT | O_TRUNC, STDERR_FILENO);
  for (const auto& [name, value] : call.environment) setenv(name.c_str(), value.c_str(), 1);
  ExecPalu(call.arguments);
}

int ExitCode(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status); }

std::chrono::steady_clock::time_point Deadline() {
  return std::chrono::steady_clock::now() + std::chrono::minutes(2);
}

// What the terminal shows within a short while; false at its end.
bool ReadScreen(int terminal, std::string& screen) {
  pollfd poll_in = {terminal, POLLIN, 0};
  if (poll(&poll_in, 1, 20) <= 0) return true;
  char bytes[4096];
  const ssize_t n = read(terminal, bytes, sizeof bytes);
  if (n <= 0) return false;  // EIO: the program has gone
  screen.append(bytes, n);
  return true;
}

}  // namespace

TempFolder::TempFolder() {
  std::string name = (fs::temp_directory_path() / "palu_test_XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make " + name);
  path_ = name;
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void TempFolder::Put(const std::string& name, const std::string& bytes) const {
  std::ofstream(Path(name), std::ios::binary) << bytes;
}

std::string TempFolder::Get(const std::string& name) const {
  std::ostringstream bytes;
  bytes << std::ifstream(Path(name), std::ios::binary).rdbuf();
  return bytes.str();
}

Outcome Palu(const Invocation& call) {
  const TempFolder folder;
  folder.Put("in", call.input);
  const std::string out = call.out_file.empty() ? folder.Path("out") : call.out_file;
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("cannot fork");
  if (child == 0) Exec(call, folder.Path("in"), out, folder.Path("err"));
  const auto limit = Deadline();
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > limit) kill(child, SIGKILL);
    if (call.watch) call.watch(child, folder.Get("out"));
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return {ExitCode(status), call.out_file.empty() ? folder.Get("out") : "", folder.Get("err")};
}

Outcome Palu(std::vector<std::string> arguments, std::string input) {
  Invocation call;
  call.arguments = std::move(arguments);
  call.input = std::move(input);
  return Palu(call);
}

bool HasTerminals() {
  int terminal = -1, program = -1;
  if (openpty(&terminal, &program, nullptr, nullptr, nullptr) != 0) return false;
  close(terminal);
  close(program);
  return true;
}

Outcome PaluOnTerminal(const std::vector<std::string>& arguments, std::vector<Step> steps) {
  int terminal = -1;
  winsize size{};
  size.ws_row = 24;
  size.ws_col = 80;
  const pid_t child = forkpty(&terminal, nullptr, nullptr, &size);
  if (child < 0) throw std::runtime_error("cannot open a terminal");
  if (child == 0) ExecPalu(arguments);
  std::string screen;
  size_t seen = 0, step = 0;
  const auto limit = Deadline();
  while (ReadScreen(terminal, screen)) {
    if (std::chrono::steady_clock::now() > limit) kill(child, SIGKILL);
    if (step == steps.size() || screen.find(steps[step].wait_for, seen) == std::string::npos) {
      continue;
    }
    seen = screen.size();
    const std::string& keys = steps[step++].type;
    if (write(terminal, keys.data(), keys.size()) < 0) break;
  }
  int status = 0;
  waitpid(child, &status, 0);
  close(terminal);
  return {ExitCode(status), screen, ""};
}

}  // namespace palu::app
