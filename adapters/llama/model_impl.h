// File: model_impl.h - what the adapter's files share of a model.
#ifndef PALU_ADAPTERS_LLAMA_MODEL_IMPL_H_
#define PALU_ADAPTERS_LLAMA_MODEL_IMPL_H_

#include <llama.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "llama/gguf_file.h"
#include "llama/layer_probe.h"
#include "llama/model.h"

namespace palu::llama {

struct Model::Impl {
  std::unique_ptr<llama_model, decltype(&llama_model_free)> model{nullptr, llama_model_free};
  const llama_vocab* vocab = nullptr;
  ModelInfo info;
  ModelShape shape;               // of the layers that keep K and V
  std::vector<LayerInfo> layers;  // the same layers
  GgufFacts file;
  bool long_factors = false;  // LongRoPE: the long ones were chosen

  // The self-test's verdict: unset before it ran, "" = passed, else why not.
  mutable std::mutex self_test_mutex;
  mutable std::optional<std::string> self_test;

  bool has_tokenizer() const { return llama_vocab_type(vocab) != LLAMA_VOCAB_TYPE_NONE; }
};

}  // namespace palu::llama

#endif  // PALU_ADAPTERS_LLAMA_MODEL_IMPL_H_
