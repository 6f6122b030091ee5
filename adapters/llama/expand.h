// File: expand.h - a copy of a model with all weights in f32.
//
// With quantised weights llama.cpp rounds activations to 8 bits before it multiplies; then the last
// bit of a float grows to a few percent of the logits, and caches cannot be told apart below that
// noise. With weights in f32 the same model has none of it.
#ifndef PALU_ADAPTERS_LLAMA_EXPAND_H_
#define PALU_ADAPTERS_LLAMA_EXPAND_H_

#include <cstdint>
#include <string>

namespace palu::llama {

// Bytes of the file that ExpandToFloat writes. Errors: FormatError (no GGUF file).
int64_t FloatFileBytes(const std::string& path);

// Writes the model at `from` to `to`, weights dequantised to f32. Cost: reads and writes the files
// once. Errors: FormatError (llama.cpp cannot read or write it, with its reason); then `to` may
// hold a part.
void ExpandToFloat(const std::string& from, const std::string& to, int threads);

}  // namespace palu::llama

#endif  // PALU_ADAPTERS_LLAMA_EXPAND_H_
