#include "scenario_util.h"

#include <ggml-backend.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string_view>

namespace palu::ggml {
namespace {

constexpr char kDirectoryVariable[] = "PALU_SCENARIO_DIRECTORY";

struct Directory {
  std::filesystem::path path;
  bool ours = false;

  Directory() {
    if (const char* parents = std::getenv(kDirectoryVariable)) {
      path = parents;
      return;
    }
    ours = true;
    path = std::filesystem::temp_directory_path() / ("palu_scenario_" + std::to_string(getpid()));
    std::filesystem::create_directories(path);
    setenv(kDirectoryVariable, path.c_str(), 1);
  }
  ~Directory() {
    std::error_code ignored;
    if (ours) std::filesystem::remove_all(path, ignored);
  }
};

// llama.cpp's own words are of interest only where it fails.
void Log(ggml_log_level level, const char* text, void*) {
  if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
}

ggml_backend_dev_t Device() {
  static const ggml_backend_dev_t device = [] {
    llama_log_set(Log, nullptr);
    if (!ggml_backend_load(PALU_PLUGIN)) throw std::runtime_error("cannot load " PALU_PLUGIN);
    return ggml_backend_dev_by_name("PALU");
  }();
  return device;
}

std::string Cache() {
  const char* const text = std::getenv("PALU_CACHE");
  return text != nullptr && *text != 0 ? text : "palu";
}

}  // namespace

std::string ScenarioPath(const std::string& name) {
  static const Directory directory;
  return (directory.path / name).string();
}

Pair::Pair(const llama::RandomModel& model, int gpu_layers)
    : random(model), exact(nullptr, llama_model_free), palu(nullptr, llama_model_free) {
  const std::string path = ScenarioPath(model.architecture + ".gguf");
  llama::WriteRandomModel(model, path);
  ggml_backend_dev_t none[] = {nullptr}, ours[] = {Device(), nullptr};
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = gpu_layers;
  params.devices = ours;
  palu.reset(llama_model_load_from_file(path.c_str(), params));
  params.devices = none;
  exact.reset(llama_model_load_from_file(path.c_str(), params));
  if (!exact || !palu) throw std::runtime_error("cannot load " + path);
}

Client::Client(llama_model* model, const ClientOptions& options, bool exact)
    : context_(nullptr, llama_free),
      vocabulary_(llama_vocab_n_tokens(llama_model_get_vocab(model))) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = options.cells;
  params.n_seq_max = options.sequences;
  params.n_batch = 512;
  params.n_ubatch = options.ubatch;
  params.n_threads = params.n_threads_batch = options.threads;
  params.kv_unified = options.unified;
  params.swa_full = options.full_swa;
  params.type_k = params.type_v = exact ? GGML_TYPE_F32 : options.nominal;
  params.flash_attn_type = exact ? LLAMA_FLASH_ATTN_TYPE_DISABLED : LLAMA_FLASH_ATTN_TYPE_AUTO;
  context_.reset(llama_init_from_model(model, params));
  if (!context_) throw std::runtime_error("no context");
}

int Client::TryDecode(const std::vector<Item>& items) {
  const int n = static_cast<int>(items.size());
  llama_batch batch = llama_batch_init(n, 0, 1);
  batch.n_tokens = n;
  for (int i = 0; i < n; ++i) {
    batch.token[i] = items[i].token;
    batch.pos[i] = items[i].position;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = items[i].sequence;
    batch.logits[i] = 1;
  }
  const int code = llama_decode(context_.get(), batch);
  llama_batch_free(batch);
  if (code != 0) return code;
  for (int i = 0; i < n; ++i) {
    const float* const row = llama_get_logits_ith(context_.get(), i);
    logits_.insert(logits_.end(), row, row + vocabulary_);
  }
  return 0;
}

void Client::Decode(const std::vector<Item>& items) {
  const int code = TryDecode(items);
  if (code != 0) throw std::runtime_error("llama_decode returned " + std::to_string(code));
}

void Client::Append(llama_seq_id sequence, int n, std::vector<Item>& items) {
  llama_pos next = llama_memory_seq_pos_max(memory(), sequence) + 1;
  for (const Item& item : items) {
    if (item.sequence == sequence) next = std::max(next, item.position + 1);
  }
  for (int i = 0; i < n; ++i) {
    random_ = random_ * 1664525u + 1013904223u;
    items.push_back({static_cast<llama_token>((random_ >> 8) % static_cast<uint32_t>(vocabulary_)),
                     next + i, sequence});
  }
}

void Client::Feed(llama_seq_id sequence, int n, int chunk) {
  for (int done = 0; done < n; done += chunk) {
    std::vector<Item> items;
    Append(sequence, std::min(chunk, n - done), items);
    Decode(items);
  }
}

bool Packs() { return Cache().starts_with("palu"); }

Errors Compare(const std::vector<float>& exact, const std::vector<float>& got, int vocabulary) {
  Errors e;
  const llama::Difference all = llama::Compare(exact, got, vocabulary);
  e.spread = all.spread;
  e.rms = all.rms / all.spread;
  e.max = all.max / all.spread;
  if (exact.size() != got.size()) return e;
  for (size_t row = 0; row < exact.size(); row += vocabulary) {
    double squares = 0;
    for (size_t i = row; i < row + vocabulary; ++i) {
      squares += (double{exact[i]} - got[i]) * (double{exact[i]} - got[i]);
    }
    e.worst = std::max(e.worst, std::sqrt(squares / vocabulary) / all.spread);
  }
  return e;
}

// Twice what was measured over all scenarios.
Bound BoundOf(const std::string& architecture, bool rounded) {
  // Whether a token goes to this expert or that may hang on a rounding.
  const bool jumps = architecture == "gpt-oss";
  if (Packs()) return {0.4, 4, jumps ? 2 : 0.9};
  if (Cache().starts_with("fp16") || rounded) {
    return jumps ? Bound{0.1, 4, 2} : Bound{1.5e-3, 1.1e-2, 3e-3};
  }
  // ggml looks their GELU up in a table of f16 values.
  if (architecture.starts_with("gemma")) return {2e-4, 2.5e-3, 5e-4};
  return {2e-6, 2e-5, 1e-5};
}

void ExpectWithin(const Errors& e, Bound bound) {
  std::printf("errors %.3g, max %.3g, worst row %.3g; allowed %.3g, %.3g, %.3g\n", e.rms, e.max,
              e.worst, bound.rms, bound.max, bound.worst);
  EXPECT_GT(e.spread, 0.1);
  EXPECT_LE(e.rms, bound.rms);
  EXPECT_LE(e.max, bound.max);
  EXPECT_LE(e.worst, bound.worst);
  if (Packs()) {
    EXPECT_GT(e.rms, 5e-3) << "nothing was packed";
  }
}

void ExpectClose(const Pair& pair, const ClientOptions& options, const Scenario& scenario,
                 bool rounded) {
  Client exact(pair.exact.get(), options, /*exact=*/true);
  scenario(exact);
  Client got(pair.palu.get(), options, /*exact=*/false);
  scenario(got);
  ExpectWithin(Compare(exact.logits(), got.logits(), exact.vocabulary()),
               BoundOf(pair.random.architecture, rounded));
}

}  // namespace palu::ggml
