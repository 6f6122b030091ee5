// File: self_test.h - a few tokens with our attention against plain llama.cpp.
#ifndef PALU_ADAPTERS_LLAMA_SELF_TEST_H_
#define PALU_ADAPTERS_LLAMA_SELF_TEST_H_

#include <string>

#include "llama/model_impl.h"

namespace palu::llama {

// Runs once per model; later calls return the first verdict. "" = they agree, else what differs.
// So a model of unknown architecture is a clear no instead of garbage.
//
// Two runs over the same few tokens. In the first llama.cpp computes as it always does, and our
// attention (on an exact cache) only looks on: each layer's output is compared with llama.cpp's own
// for the same input. In the second our attention takes over, as in a session, and the logits are
// compared with the first's. Comparing logits alone would say little: with quantized weights
// llama.cpp rounds activations to 8 bits, and a difference in the last bit of one float grows to
// several percent of the logits' standard deviation over 30 layers. Cost: two contexts of 256 cells
// and a few dozen tokens through each.
std::string SelfTest(const Model::Impl& model, int threads);

}  // namespace palu::llama

#endif  // PALU_ADAPTERS_LLAMA_SELF_TEST_H_
