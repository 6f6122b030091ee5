#include "files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>

#include "palu/errors.h"
#include "utf8.h"

namespace palu::app {
namespace {

[[noreturn]] void Fail(std::string_view action, std::string_view what, int error) {
  throw FormatError(fmt::format("cannot {} {}: {}", action, what, std::strerror(error)));
}

// Devices, pipes and the like are written as they are: never tried out, never removed.
bool IsSpecial(const std::string& path) {
  struct stat status;
  return stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode);
}

std::string ReadAll(int descriptor, const std::string& name) {
  std::string text;
  char buffer[1 << 16];
  while (true) {
    const ssize_t n = read(descriptor, buffer, sizeof buffer);
    if (n == 0) return text;
    if (n > 0) {
      text.append(buffer, n);
    } else if (errno != EINTR) {
      Fail("read", name, errno);
    }
  }
}

}  // namespace

std::string ReadText(const std::string& path) {
  const bool standard = path == "-";
  const std::string name = standard ? "standard input" : path;
  const int descriptor = standard ? STDIN_FILENO : open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) Fail("read", name, errno);
  std::string text;
  try {
    text = ReadAll(descriptor, name);
  } catch (...) {
    if (!standard) close(descriptor);
    throw;
  }
  if (!standard) close(descriptor);
  if (text.starts_with("\xEF\xBB\xBF")) text.erase(0, 3);
  RequireUtf8(text, name);
  return text;
}

void RequireUtf8(std::string_view text, std::string_view what) {
  const size_t at = FindInvalidUtf8(text);
  if (at == std::string_view::npos) return;
  throw InputError(fmt::format("{} is not UTF-8: byte 0x{:02X} at offset {}", what,
                               static_cast<uint8_t>(text[at]), at));
}

void CheckWritable(const std::string& path) {
  if (IsSpecial(path)) {
    if (access(path.c_str(), W_OK) != 0) Fail("write", path, errno);
    return;
  }
  int descriptor = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  const bool create = descriptor < 0 && errno == ENOENT;
  if (create) descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) Fail("write", path, errno);
  close(descriptor);
  if (create) unlink(path.c_str());
}

void WriteFile(const std::string& path, std::string_view contents) {
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor < 0) Fail("write", path, errno);
  const bool remove = !IsSpecial(path);
  bool open = true;
  try {
    WriteAll(descriptor, contents, path);
    open = false;
    if (close(descriptor) != 0) Fail("write", path, errno);
  } catch (...) {
    if (open) close(descriptor);
    if (remove) unlink(path.c_str());
    throw;
  }
}

void WriteJson(const std::string& path, const nlohmann::ordered_json& json) {
  using nlohmann::ordered_json;
  std::string text = "{\n";
  for (auto field = json.begin(); field != json.end(); ++field) {
    text += fmt::format("{} {}: {}", field == json.begin() ? "" : ",\n",
                        ordered_json(field.key()).dump(),
                        field->dump(-1, ' ', false, ordered_json::error_handler_t::replace));
  }
  WriteFile(path, text + "\n}\n");
}

void WriteAll(int descriptor, std::string_view bytes, std::string_view what) {
  while (!bytes.empty()) {
    const ssize_t n = write(descriptor, bytes.data(), bytes.size());
    if (n >= 0) {
      bytes.remove_prefix(n);
    } else if (errno != EINTR) {
      Fail("write", what, errno);
    }
  }
}

}  // namespace palu::app
