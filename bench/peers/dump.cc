#include "dump.h"

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>

#include "llama/model.h"
#include "llama/session.h"
#include "npy.h"
#include "palu/palu.h"

namespace palu::peers {
namespace {

constexpr char kManifest[] = "manifest.json";

std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw FormatError(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string FileName(size_t layer, char side) {
  const std::string number = std::to_string(layer);
  const std::string zeros(number.size() < 3 ? 3 - number.size() : 0, '0');
  return "layer_" + zeros + number + '_' + side + ".npy";
}

nlohmann::ordered_json ToJson(const Dump& dump) {
  nlohmann::ordered_json json;
  json["model"] = dump.model;
  json["text"] = dump.text;
  json["tokens"] = dump.tokens;
  json["context"] = dump.context;
  for (const DumpLayer& layer : dump.layers) {
    json["layers"].push_back({{"k", layer.k},
                              {"v", layer.v},
                              {"rope_halves", layer.rope.pairing == RopePairing::kHalves},
                              {"rope_inv_freq", layer.rope.inv_freq}});
  }
  return json;
}

// An exact cache per layer, to gather rows in: without sliding windows, so that nothing is dropped.
std::vector<KVCache> Gatherers(ModelShape shape) {
  for (LayerShape& layer : shape.layers) layer.window = 0;
  return KVCacheBuilder::ForModel(shape, KVCacheConfig::Parse("fp16"));
}

}  // namespace

void WriteDump(const std::string& model_path, const std::string& text, int64_t tokens, int threads,
               const std::filesystem::path& folder) {
  const auto model = llama::Model::Load(model_path);
  const std::vector<llama::Token> all = model->Tokenize(ReadText(text), true, false);
  if (static_cast<int64_t>(all.size()) < tokens) {
    throw InputError(text + " has " + std::to_string(all.size()) + " tokens; --tokens asks for " +
                     std::to_string(tokens));
  }
  std::vector<KVCache> rows = Gatherers(model->shape());
  Dump dump{model_path, text, tokens, model->info().train_context, {}};
  dump.layers.resize(rows.size());

  llama::SessionOptions options;
  options.cache = "fp16";
  options.threads = threads;
  options.context = tokens;
  llama::Session session(model, options);
  session.SetObserver([&](int layer, const ConstTensor& k, const ConstTensor& v, int64_t position,
                          const RopeParams& rope) {
    rows[layer].Append(k, v, {.position = position, .rope = &rope});
    dump.layers[layer].rope = rope;
  });
  session.Decode(std::span(all).first(static_cast<size_t>(tokens)), llama::LogitRows::kNone);

  std::filesystem::create_directories(folder);
  for (size_t i = 0; i < rows.size(); ++i) {
    dump.layers[i].k = FileName(i, 'k');
    dump.layers[i].v = FileName(i, 'v');
    const KVCache::KV kv = rows[i].Reconstruct(DType::kF16);
    WriteNpy(folder / dump.layers[i].k, kv.k);
    WriteNpy(folder / dump.layers[i].v, kv.v);
  }
  std::ofstream manifest(folder / kManifest);
  manifest << ToJson(dump).dump(1) << '\n';
  manifest.close();
  if (!manifest) throw FormatError((folder / kManifest).string() + ": cannot be written");
}

Dump ReadDump(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / kManifest;
  std::ifstream file(path);
  if (!file) throw FormatError(path.string() + ": cannot be read; `palu_peers dump` writes it");
  try {
    const nlohmann::json json = nlohmann::json::parse(file);
    Dump dump{json.at("model"), json.at("text"), json.at("tokens"), json.at("context"), {}};
    for (const nlohmann::json& layer : json.at("layers")) {
      dump.layers.push_back({layer.at("k"), layer.at("v"), {}});
      dump.layers.back().rope.pairing =
          layer.at("rope_halves").get<bool>() ? RopePairing::kHalves : RopePairing::kInterleaved;
      layer.at("rope_inv_freq").get_to(dump.layers.back().rope.inv_freq);
    }
    return dump;
  } catch (const nlohmann::json::exception& e) {
    throw FormatError(path.string() + ": not a manifest of `palu_peers dump` (" + e.what() + ")");
  }
}

}  // namespace palu::peers
