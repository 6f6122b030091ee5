#include "llama/model.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <mutex>

#include "llama/log.h"
#include "llama/model_impl.h"
#include "palu/errors.h"

namespace palu::llama {
namespace {

// LongRoPE's choice is `cells of llama.cpp's cache > original context`. Its cache is tiny here, so
// the choice is made through the right-hand side: 128 is below, kNeverLong above any number of
// cells.
constexpr int64_t kAlwaysLong = 128;
constexpr int64_t kNeverLong = int64_t{1} << 30;

std::string MetaString(const llama_model* model, const char* key) {
  std::string text(256, '\0');
  const int n = llama_model_meta_val_str(model, key, text.data(), text.size());
  text.resize(std::clamp<int>(n, 0, static_cast<int>(text.size()) - 1));
  return text;
}

llama_model* LoadFile(const std::string& path, const GgufFacts& file, bool long_factors) {
  static std::once_flag once;
  std::call_once(once, llama_backend_init);
  llama_model_params params = llama_model_default_params();
  // Everything on the CPU: attention reads Q, K and V in host memory.
  std::array<ggml_backend_dev_t, 1> no_devices{nullptr};
  params.devices = no_devices.data();
  params.n_gpu_layers = 0;
  std::array<llama_model_kv_override, 2> overrides{};  // ends with an empty key
  if (file.long_rope) {
    overrides[0].tag = LLAMA_KV_OVERRIDE_TYPE_INT;
    overrides[0].val_i64 = long_factors ? kAlwaysLong : kNeverLong;
    std::snprintf(overrides[0].key, sizeof overrides[0].key,
                  "%s.rope.scaling.original_context_length", file.architecture.c_str());
    params.kv_overrides = overrides.data();
  }
  const ErrorLog log;
  llama_model* model = llama_model_load_from_file(path.c_str(), params);
  if (model == nullptr) throw FormatError("llama.cpp cannot load " + path + log.suffix());
  return model;
}

// Why the attention of a model cannot be taken over, as far as the API tells; "" when nothing
// speaks against it.
std::string ReasonToRefuse(const llama_model* model) {
  if (llama_model_is_recurrent(model)) return "it is recurrent: its state is no KV cache";
  if (llama_model_is_hybrid(model)) {
    return "it is hybrid: its recurrent layers keep state that is lost when llama.cpp's cache is "
           "cleared after each batch";
  }
  if (llama_model_has_encoder(model)) return "it has an encoder";
  if (!llama_model_has_decoder(model)) return "it has no decoder";
  if (llama_model_is_diffusion(model)) return "it is a diffusion model: it keeps no KV cache";
  return "";
}

ModelInfo ReadInfo(const llama_model* model, const std::string& path, const GgufFacts& file) {
  const llama_vocab* vocab = llama_model_get_vocab(model);
  ModelInfo info;
  info.path = path;
  info.name = MetaString(model, "general.name");
  info.architecture = file.architecture;
  info.layers = llama_model_n_layer(model);
  info.heads = llama_model_n_head(model);
  info.train_context = llama_model_n_ctx_train(model);
  info.parameters = static_cast<int64_t>(llama_model_n_params(model));
  info.file_bytes = file.file_bytes;
  info.vocabulary = llama_vocab_n_tokens(vocab);
  info.adds_bos = llama_vocab_get_add_bos(vocab);
  info.has_chat_template = llama_model_chat_template(model, nullptr) != nullptr;
  return info;
}

}  // namespace

Model::Model() : impl_(std::make_unique<Impl>()) {}
Model::~Model() = default;

std::shared_ptr<const Model> Model::Load(const std::string& path, const ModelOptions& options) {
  if (options.context < 0) {
    throw ConfigError("context is " + std::to_string(options.context) +
                      "; allowed: 0 (the training context) or more");
  }
  SilenceLog();
  std::shared_ptr<Model> model(new Model());
  Impl& impl = *model->impl_;
  impl.file = CheckGgufFile(path);
  // The training context of a LongRoPE model is the long one.
  impl.long_factors =
      impl.file.long_rope && (options.context == 0 || options.context > impl.file.original_context);
  impl.model.reset(LoadFile(path, impl.file, impl.long_factors));
  impl.vocab = llama_model_get_vocab(impl.model.get());
  impl.info = ReadInfo(impl.model.get(), path, impl.file);

  const std::string refused = path + " (" + impl.info.architecture + ") cannot be run: ";
  if (const std::string reason = ReasonToRefuse(impl.model.get()); !reason.empty()) {
    throw FormatError(refused + reason);
  }
  try {
    impl.layers = ProbeLayers(impl.model.get());
  } catch (const FormatError& error) {
    throw FormatError(refused + error.what());
  }
  for (const LayerInfo& layer : impl.layers) impl.shape.layers.push_back(layer.shape);
  impl.shape.model = impl.info.name + " (" + impl.info.architecture + ", " +
                     std::to_string(impl.info.parameters) + " parameters)";
  impl.shape.context = options.context > 0 ? options.context : impl.info.train_context;
  return model;
}

const ModelInfo& Model::info() const { return impl_->info; }
const ModelShape& Model::shape() const { return impl_->shape; }
llama_model* Model::handle() const { return impl_->model.get(); }

}  // namespace palu::llama
