#include "check/plugin_file.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <system_error>

#include "palu/errors.h"

namespace palu::app {
namespace {

namespace fs = std::filesystem;

constexpr char kName[] = "libggml-palu.so";

// The advice of all faults; without a path where there is no plug-in of our own to name.
std::string Export() {
  try {
    return fmt::format("export GGML_BACKEND_PATH={}", OwnPlugin());
  } catch (const StateError&) {
    return fmt::format("export GGML_BACKEND_PATH=... with the path of {}", kName);
  }
}

}  // namespace

std::string OwnPlugin() {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (error) throw StateError("cannot tell where this program is: " + error.message());
  const fs::path folder = program.parent_path();
  // Installed: bin/ beside the folder of libraries. Built: apps/palu/ beside lib/.
  const std::array<fs::path, 2> places = {folder.parent_path() / PALU_LIBRARY_FOLDER / kName,
                                          folder.parent_path().parent_path() / "lib" / kName};
  for (const fs::path& place : places) {
    if (fs::is_regular_file(place, error)) return place.string();
  }
  throw StateError(fmt::format("there is no {}: it should be {} (installed) or {} (built)", kName,
                               places[0].string(), places[1].string()));
}

std::string PluginFileFault(const char* path) {
  if (path == nullptr || *path == 0) return "GGML_BACKEND_PATH is not set: " + Export();
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const reason = dlerror();
    std::error_code error;
    if (!fs::exists(path, error)) {
      return fmt::format("GGML_BACKEND_PATH={}: there is no such file: {}", path, Export());
    }
    return fmt::format("GGML_BACKEND_PATH={} cannot be loaded ({}): {}", path, reason, Export());
  }
  const bool is_plugin = dlsym(library, "ggml_backend_init") != nullptr;
  const bool is_ours = dlsym(library, "palu_ggml_version") != nullptr;
  dlclose(library);
  if (is_plugin && is_ours) return "";
  return fmt::format("GGML_BACKEND_PATH={} is {}, not palu: {}", path,
                     is_plugin ? "a plug-in of another" : "no plug-in of ggml", Export());
}

}  // namespace palu::app
