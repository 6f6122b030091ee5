// File: abi_symbols.cc - the ggml functions of this process, found without linking to ggml.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // dladdr, RTLD_DEFAULT
#endif
#include "abi_symbols.h"

#include <dlfcn.h>

#ifdef __linux__
#include <link.h>
#endif

#include <string>
#include <vector>

namespace palu::ggml {
namespace {

// The handle of a library that is already loaded, without loading it; null: it is not, or it has
// not got `probe`.
void* Loaded(const char* path, const char* probe) {
  void* handle = dlopen(path, RTLD_NOLOAD | RTLD_LAZY);
  if (handle == nullptr || dlsym(handle, probe) != nullptr) return handle;
  dlclose(handle);
  return nullptr;
}

// Paths of all loaded libraries. Collected first, as dlopen must not be called while the loader
// walks its list.
std::vector<std::string> LoadedPaths() {
  std::vector<std::string> paths;
#ifdef __linux__
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        if (info->dlpi_name != nullptr && info->dlpi_name[0] != '\0') {
          static_cast<std::vector<std::string>*>(out)->emplace_back(info->dlpi_name);
        }
        return 0;
      },
      &paths);
#endif
  return paths;
}

}  // namespace

std::optional<void*> FindGgml(const void* caller, const char* probe) {
  Dl_info info = {};
  if (caller != nullptr && dladdr(caller, &info) != 0 && info.dli_fname != nullptr) {
    if (void* handle = Loaded(info.dli_fname, probe)) return handle;
  }
  if (dlsym(RTLD_DEFAULT, probe) != nullptr) return RTLD_DEFAULT;
  for (const std::string& path : LoadedPaths()) {
    if (void* handle = Loaded(path.c_str(), probe)) return handle;
  }
  return std::nullopt;
}

}  // namespace palu::ggml
