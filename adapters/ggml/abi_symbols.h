// File: abi_symbols.h - the ggml functions of this process, found without linking to ggml.
#ifndef PALU_ADAPTERS_GGML_ABI_SYMBOLS_H_
#define PALU_ADAPTERS_GGML_ABI_SYMBOLS_H_

#include <optional>

namespace palu::ggml {

// A handle for dlsym through which `probe`, a function of ggml, is found: that of the library which
// `caller` lies in (its dependencies included), else the global scope, else the first loaded
// library that has it, as ggml may be loaded without its names being global (Python's ctypes does
// so). Empty: no loaded object exports it. What the handle names stays loaded.
std::optional<void*> FindGgml(const void* caller, const char* probe);

}  // namespace palu::ggml

#endif  // PALU_ADAPTERS_GGML_ABI_SYMBOLS_H_
