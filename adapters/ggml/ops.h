// File: ops.h - the graph nodes that touch our cache: which ones can be run, and how.
#ifndef PALU_ADAPTERS_GGML_OPS_H_
#define PALU_ADAPTERS_GGML_OPS_H_

#include <ggml.h>

#include "ggml/abi.h"

namespace palu::ggml {

// Whether ggml may give us this node: every node that touches a cache of ours, and views. Ends the
// program for one that we cannot run (report.h): ggml would abort, or copy the whole cache for
// every token. Learns heads and rotation of the layers from the nodes.
bool Supports(const Host& host, const ggml_tensor* node);

struct Threads {
  int count = 0;       // 0 = all
  bool shared = true;  // with ggml: abi_threads.h
};

// Runs one node, a few tokens on one thread where threads are not shared. Errors of the input or of
// memory are said and returned as a status; a context shift that fails ends the program, since
// llama.cpp would go on with wrong positions.
ggml_status Run(const Host& host, ggml_tensor* node, const Threads& threads);

}  // namespace palu::ggml

#endif  // PALU_ADAPTERS_GGML_OPS_H_
