// File: abi_threads.cc - whether ggml's threads and ours are the same.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // dladdr1
#endif
#include "abi_threads.h"

#include <dlfcn.h>

#ifdef __linux__
#include <link.h>
#endif

#include <algorithm>

namespace palu::ggml {

std::vector<std::string> NeededLibraries(const void* address) {
  std::vector<std::string> names;
#ifdef __linux__
  Dl_info info = {};
  link_map* object = nullptr;
  if (dladdr1(address, &info, reinterpret_cast<void**>(&object), RTLD_DL_LINKMAP) == 0 ||
      object == nullptr || object->l_ld == nullptr) {
    return names;
  }
  ElfW(Addr) strings = 0;
  for (const ElfW(Dyn)* d = object->l_ld; d->d_tag != DT_NULL; ++d) {
    if (d->d_tag == DT_STRTAB) strings = d->d_un.d_ptr;
  }
  if (strings == 0) return names;
  if (strings < object->l_addr) strings += object->l_addr;  // loaders differ in whether they add it
  for (const ElfW(Dyn)* d = object->l_ld; d->d_tag != DT_NULL; ++d) {
    if (d->d_tag == DT_NEEDED) {
      names.emplace_back(reinterpret_cast<const char*>(strings + d->d_un.d_val));
    }
  }
#endif
  return names;
}

bool ShareOpenMp(const void* ours, const void* theirs) {
  const std::vector<std::string> needed = NeededLibraries(ours), all = NeededLibraries(theirs);
  return std::any_of(needed.begin(), needed.end(), [&](const std::string& name) {
    const bool is_openmp =
        name.starts_with("libgomp.") || name.starts_with("libomp.") || name.starts_with("libiomp");
    return is_openmp && std::find(all.begin(), all.end(), name) != all.end();
  });
}

bool SharesThreads(const Host& host, const void* own) {
  const Functions& f = host.functions;
  ggml_backend_device* const cpu = f.dev_by_type(kCpuDevice);
  const void* const code =
      cpu != nullptr ? f.reg_proc_address(f.dev_reg(cpu), "ggml_backend_set_n_threads") : nullptr;
  return code == nullptr || ShareOpenMp(own, code);
}

}  // namespace palu::ggml
