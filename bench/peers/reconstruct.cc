// The program palu_peers: K and V of a real model as .npy files, and what a cache makes of them.
//
//   palu_peers dump -m MODEL -f TEXT --tokens 2048 -o DIR
//   palu_peers reconstruct --cache palu:reference -o OUT DIR
//
// For compare_with_veloxquant.py, which gives the same files to another implementation.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "dump.h"
#include "npy.h"
#include "palu/palu.h"

namespace palu::peers {
namespace {

struct DumpOptions {
  std::string model, text, folder;
  int64_t tokens = 2048;
  int threads = 0;
};

struct ReconstructOptions {
  std::string folder, out, cache;
  int64_t first = 0;  // tokens of the first append; 0 = all
  int64_t chunk = 1;  // tokens of each append after it
  int threads = 0;
};

// Tokens [first, first + n) of a dense [1, H, S, D] tensor; no copy.
ConstTensor Tokens(const OwnedTensor& tensor, int64_t first, int64_t n) {
  ConstTensor view = tensor.view();
  view.data =
      tensor.data.data() + static_cast<size_t>(first * view.stride[2]) * DTypeBytes(tensor.dtype);
  view.shape[2] = n;
  return view;
}

KVCache MakeCache(const OwnedTensor& k, const OwnedTensor& v, const Dump& dump, int index,
                  const ReconstructOptions& o) {
  LayerShape layer;
  layer.index = index;
  layer.kv_heads = static_cast<int>(k.shape[1]);
  layer.head_dim_k = static_cast<int>(k.shape[3]);
  layer.head_dim_v = static_cast<int>(v.shape[3]);
  ModelShape shape;
  shape.layers = {layer};
  shape.context = dump.context;
  shape.threads = o.threads;
  return std::move(KVCacheBuilder::ForModel(shape, KVCacheConfig::Parse(o.cache)).front());
}

nlohmann::ordered_json ToJson(const CacheStats& stats) {
  return {{"tokens", stats.tokens},
          {"encoded_tokens", stats.encoded_tokens},
          {"rank_k", stats.rank_k},
          {"rank_v", stats.rank_v},
          {"assigned_avg_bits", stats.assigned_avg_bits},
          {"code_bits", stats.code_bits},
          {"stored_bits_per_element", stats.stored_bits_per_element}};
}

// One layer through a cache of its own; writes what comes back and returns its numbers.
nlohmann::ordered_json ReconstructLayer(const Dump& dump, int index, const ReconstructOptions& o) {
  const DumpLayer& layer = dump.layers[index];
  const OwnedTensor k = ReadNpy(std::filesystem::path(o.folder) / layer.k);
  const OwnedTensor v = ReadNpy(std::filesystem::path(o.folder) / layer.v);
  KVCache cache = MakeCache(k, v, dump, index, o);
  const int64_t tokens = k.shape[2];
  for (int64_t at = 0; at < tokens;) {
    const int64_t wanted = at > 0 ? o.chunk : o.first > 0 ? o.first : tokens;
    const int64_t n = std::min(wanted, tokens - at);
    cache.Append(Tokens(k, at, n), Tokens(v, at, n), {.position = at, .rope = &layer.rope});
    cache.Seal();
    at += n;
  }
  const KVCache::KV kv = cache.Reconstruct();
  WriteNpy(std::filesystem::path(o.out) / layer.k, kv.k);
  WriteNpy(std::filesystem::path(o.out) / layer.v, kv.v);
  return ToJson(cache.Stats());
}

void Reconstruct(const ReconstructOptions& o) {
  const Dump dump = ReadDump(o.folder);
  const KVCacheConfig config = KVCacheConfig::Parse(o.cache);
  std::filesystem::create_directories(o.out);
  nlohmann::ordered_json report;
  report["cache"] = config.ToString();
  report["kernel"] = KernelTarget();
  for (size_t i = 0; i < dump.layers.size(); ++i) {
    report["layers"].push_back(ReconstructLayer(dump, static_cast<int>(i), o));
  }
  const std::filesystem::path path = std::filesystem::path(o.out) / "report.json";
  std::ofstream file(path);
  file << report.dump(1) << '\n';
  file.close();
  if (!file) throw FormatError(path.string() + ": cannot be written");
}

void AddDump(CLI::App& app, DumpOptions& o) {
  CLI::App* verb = app.add_subcommand("dump", "Write K and V of a model as .npy files");
  verb->add_option("-m,--model", o.model, "GGUF file")->required()->type_name("FILE");
  verb->add_option("-f,--file", o.text, "Text")->required()->type_name("FILE");
  verb->add_option("--tokens", o.tokens, "Tokens of the text to run")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{2}, int64_t{1} << 20));
  verb->add_option("-o,--out", o.folder, "Folder to write")->required()->type_name("DIR");
  verb->add_option("-t,--threads", o.threads, "Threads; 0 = all cores")->capture_default_str();
}

void AddReconstruct(CLI::App& app, ReconstructOptions& o) {
  CLI::App* verb = app.add_subcommand("reconstruct", "Put a dump through a cache and read it back");
  verb->add_option("dump", o.folder, "Folder that `dump` wrote")->required()->type_name("DIR");
  verb->add_option("-c,--cache", o.cache, "Cache: METHOD[:PRESET][,key=value]...")->required();
  verb->add_option("-o,--out", o.out, "Folder to write")->required()->type_name("OUT");
  verb->add_option("--first", o.first, "Tokens of the first append; 0 = all")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  verb->add_option("--chunk", o.chunk, "Tokens of each append after the first")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  verb->add_option("-t,--threads", o.threads, "Threads; 0 = all cores")->capture_default_str();
}

int Main(int argc, char** argv) {
  CLI::App app("K and V of a model as .npy files, and what a cache makes of them", "palu_peers");
  app.require_subcommand(1);
  DumpOptions dump;
  ReconstructOptions reconstruct;
  AddDump(app, dump);
  AddReconstruct(app, reconstruct);
  CLI11_PARSE(app, argc, argv);
  try {
    if (app.got_subcommand("dump")) {
      WriteDump(dump.model, dump.text, dump.tokens, dump.threads, dump.folder);
    } else {
      Reconstruct(reconstruct);
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "palu_peers: error: %s\n", e.what());
    return 1;
  }
}

}  // namespace
}  // namespace palu::peers

int main(int argc, char** argv) { return palu::peers::Main(argc, argv); }
