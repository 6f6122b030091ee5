// File: dump.h - a folder with the K and V of a real model, layer by layer.
//
//   manifest.json      model, text, tokens, context, and per layer: files, how keys were rotated
//   layer_000_k.npy    [1, H, S, D] f16, keys after RoPE
//   layer_000_v.npy
#ifndef PALU_BENCH_PEERS_DUMP_H_
#define PALU_BENCH_PEERS_DUMP_H_

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "palu/rope.h"

namespace palu::peers {

struct DumpLayer {
  std::string k, v;  // file names inside the folder
  RopeParams rope;
};

struct Dump {
  std::string model, text;  // as given
  int64_t tokens = 0;
  int64_t context = 0;  // positions the model was trained for
  std::vector<DumpLayer> layers;
};

// Runs the first `tokens` tokens of `text` through the model and writes the folder, which is made
// if need be. Layers with a sliding window are written whole. Numbers are rounded to f16, as a
// cache rounds them. Errors: those of Model::Load, FormatError (files), InputError (the text is
// shorter).
void WriteDump(const std::string& model, const std::string& text, int64_t tokens, int threads,
               const std::filesystem::path& folder);

// Errors: FormatError (missing or foreign manifest).
Dump ReadDump(const std::filesystem::path& folder);

}  // namespace palu::peers

#endif  // PALU_BENCH_PEERS_DUMP_H_
