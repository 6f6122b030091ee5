// File: abi_threads.h - whether ggml's threads and ours are the same.
#ifndef PALU_ADAPTERS_GGML_ABI_THREADS_H_
#define PALU_ADAPTERS_GGML_ABI_THREADS_H_

#include <string>
#include <vector>

#include "abi.h"

namespace palu::ggml {

// Names of the libraries that the loaded object around `address` asks for; none where it cannot be
// told.
std::vector<std::string> NeededLibraries(const void* address);

// Whether the loaded objects around two addresses use one OpenMP runtime, and so one pool of
// threads. Two pools compete for the cores, and each waits for threads that the other keeps from
// running.
bool ShareOpenMp(const void* ours, const void* theirs);

// The same for the object around `own` and the host's CPU backend. True where there is no CPU
// backend to ask.
bool SharesThreads(const Host& host, const void* own);

}  // namespace palu::ggml

#endif  // PALU_ADAPTERS_GGML_ABI_THREADS_H_
