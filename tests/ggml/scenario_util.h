// File: scenario_util.h - llama.cpp contexts on the plug-in beside exact ones, fed the same way.
//
// The plug-in is loaded as a program of a user loads it, once per process, with the cache that
// PALU_CACHE names. The exact reference is the same model on the CPU: flash attention off, an f32
// cache.
#ifndef PALU_TESTS_GGML_SCENARIO_UTIL_H_
#define PALU_TESTS_GGML_SCENARIO_UTIL_H_

#include <llama.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "adapter_test_util.h"

namespace palu::ggml {

// A path in a directory that is removed when the process that first asked ends. A process started
// by EXPECT_EXIT gets the paths of its parent.
std::string ScenarioPath(const std::string& name);

using ModelPtr = std::unique_ptr<llama_model, decltype(&llama_model_free)>;
using ContextPtr = std::unique_ptr<llama_context, decltype(&llama_free)>;

// A random model's file, loaded twice. The plug-in is loaded with the first.
struct Pair {
  llama::RandomModel random;
  ModelPtr exact, palu;

  explicit Pair(const llama::RandomModel& model, int gpu_layers = -1);
  explicit Pair(const char* architecture) : Pair(llama::MakeRandomModel(architecture)) {}
};

struct ClientOptions {
  uint32_t cells = 1024;  // of all sequences
  uint32_t sequences = 1;
  bool unified = false;  // one stream for all sequences instead of one each
  bool full_swa = true;  // caches of windowed layers as large as the others
  uint32_t ubatch = 128;
  ggml_type nominal = GGML_TYPE_F16;  // of the plug-in's cache
  int threads = 1;
};

struct Item {
  llama_token token;
  llama_pos position;
  llama_seq_id sequence;
};

// One context, and all logits that it has given.
class Client {
 public:
  Client(llama_model* model, const ClientOptions& options, bool exact);

  // Returns what llama_decode does.
  int TryDecode(const std::vector<Item>& items);
  void Decode(const std::vector<Item>& items);  // throws if it fails
  // The next n tokens of a sequence, in calls of `chunk`: random, the same in each run.
  void Feed(llama_seq_id sequence, int n, int chunk);
  // The next n tokens, to be passed to Decode with those of other sequences.
  void Append(llama_seq_id sequence, int n, std::vector<Item>& items);

  llama_context* context() { return context_.get(); }
  llama_memory_t memory() { return llama_get_memory(context_.get()); }
  const std::vector<float>& logits() const { return logits_; }
  std::vector<float>& logits() { return logits_; }
  int vocabulary() const { return vocabulary_; }

 private:
  ContextPtr context_;
  int vocabulary_;
  uint32_t random_ = 1;
  std::vector<float> logits_;
};

// What is done with a context; the same for both.
using Scenario = std::function<void(Client&)>;

// Errors of logits, in standard deviations of the exact ones.
struct Errors {
  double rms = 0, max = 0;
  double worst = 0;   // rms of the worst row; one that is computed from other tokens has 1.4
  double spread = 0;  // that standard deviation
};
Errors Compare(const std::vector<float>& exact, const std::vector<float>& got, int vocabulary);

// How large they may be.
struct Bound {
  double rms, max, worst;
};
// That of the cache that PALU_CACHE names. `rounded`: rows went through a state, as f16.
Bound BoundOf(const std::string& architecture, bool rounded = false);
// Whether PALU_CACHE names a cache that packs.
bool Packs();

void ExpectWithin(const Errors& errors, Bound bound);
// The logits of `scenario` on the plug-in against the exact ones.
void ExpectClose(const Pair& pair, const ClientOptions& options, const Scenario& scenario,
                 bool rounded = false);

}  // namespace palu::ggml

#endif  // PALU_TESTS_GGML_SCENARIO_UTIL_H_
