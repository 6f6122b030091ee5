// The driver that leaves llama.cpp's own cache and attention in place: `llama:TYPE[,fa=on|off]`, or
// `llama:TYPE_K/TYPE_V`.
#include <algorithm>
#include <set>
#include <string_view>
#include <vector>

#include "llama/driver.h"
#include "llama/graph.h"
#include "llama/log.h"
#include "llama/native_config.h"
#include "palu/errors.h"

namespace palu::llama {
namespace {

constexpr std::string_view kPrefix = "llama:";

double Bits(ggml_type type) {
  return 8.0 * static_cast<double>(ggml_type_size(type)) /
         static_cast<double>(ggml_blck_size(type));
}

// Adds up the cache tensors that a graph writes.
struct SizeProbe {
  bool active = true;
  std::set<const ggml_tensor*> tensors;

  static bool Callback(ggml_tensor* t, bool, void* self) {
    SizeProbe& probe = *static_cast<SizeProbe*>(self);
    if (!probe.active) return false;
    const NodeKind kind = Classify(t).kind;
    if (kind == NodeKind::kKeys || kind == NodeKind::kValues) probe.tensors.insert(CacheTensor(t));
    return false;  // never stops the graph
  }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const ggml_tensor* t : tensors) sum += static_cast<int64_t>(ggml_nbytes(t));
    return sum;
  }
};

class NativeDriver : public Driver {
 public:
  NativeDriver(const Model::Impl& model, const SessionOptions& options)
      : model_(model),
        config_(ParseNativeConfig(options.cache)),
        cells_(CheckedCells(model, options, config_)),
        threads_(ResolveThreads(options.threads)),
        context_(
            model.model.get(),
            {.cells = cells_,
             .ubatch = static_cast<int>(std::min<int64_t>(options.ubatch, cells_)),
             .threads = ResolveThreads(options.threads),
             .sequences = options.fillable ? 2 : 1,  // pieces of a filling come in by the second
             .type_k = config_.type_k,
             .type_v = config_.type_v,
             .flash = config_.flash,
             .full_windows = false,  // what llama.cpp's own programs do
             .callback = SizeProbe::Callback,
             .callback_data = &size_}) {
    const Token token = 0;
    Step({&token, 1}, 0, LogitRows::kNone);
    Clear();
    size_.active = false;
    if (options.kv_memory > 0 && size_.bytes() > options.kv_memory) {
      throw MemoryError("llama.cpp's cache of " + std::to_string(cells_) + " cells has " +
                        std::to_string(size_.bytes()) + " bytes; the limit is " +
                        std::to_string(options.kv_memory));
    }
  }

  void Begin(int64_t position, int64_t tokens) override {
    if (position + tokens > cells_) {
      throw StateError(std::to_string(position + tokens) +
                       " tokens do not fit llama.cpp's cache of " + std::to_string(cells_) +
                       " cells; raise the session's context");
    }
  }

  void Step(std::span<const Token> tokens, int64_t position, LogitRows rows) override {
    const ErrorLog log;
    if (const int code = context_.Decode(tokens, position, rows); code != 0)
      ThrowDecodeError(code, log.suffix());
  }

  void Commit() override {}

  void Rollback(int64_t position) override {
    llama_memory_seq_rm(context_.memory(), 0, static_cast<llama_pos>(position), -1);
    CheckWindow(position);
  }

  void Trim(int64_t position, int64_t n) override {
    CheckWindow(position - n);
    llama_memory_seq_rm(context_.memory(), 0, static_cast<llama_pos>(position - n), -1);
  }

  void Clear() override { context_.Clear(); }

  void Fill(std::span<const Token> piece, int64_t depth) override;

  SessionStats Stats(int64_t position) const override {
    SessionStats stats;
    double elements = 0;
    for (const LayerShape& layer : model_.shape.layers) {
      // As CacheStats counts them.
      const int64_t needed =
          layer.window > 0 ? std::min<int64_t>(position, layer.window) : position;
      elements +=
          static_cast<double>(needed) * layer.kv_heads * (layer.head_dim_k + layer.head_dim_v);
    }
    stats.tokens = position;
    stats.kv_bytes = size_.bytes();
    stats.kv_fp16_bytes = static_cast<int64_t>(elements * 2);
    stats.advertised_bits_per_element = (Bits(config_.type_k) + Bits(config_.type_v)) / 2;
    if (elements > 0)
      stats.stored_bits_per_element = static_cast<double>(stats.kv_bytes) * 8 / elements;
    return stats;
  }

  std::string cache_text() const override { return config_.ToString(); }
  llama_context* context() const override { return context_.get(); }
  void SetObserver(KvObserver observer) override {
    if (observer) throw StateError("llama.cpp's own cache cannot be observed; use one of ours");
  }
  void SetQueryObserver(QueryObserver observer) override {
    if (observer) throw StateError("llama.cpp's own cache cannot be observed; use one of ours");
  }
  std::span<const KVCache> caches() const override { return {}; }

 private:
  static int64_t CheckedCells(const Model::Impl& model, const SessionOptions& options,
                              const NativeConfig& config) {
    const int64_t context = options.context > 0 ? options.context : model.info.train_context;
    const int64_t cells = std::max<int64_t>(256, (context + 255) / 256 * 256);
    double smallest = 0;  // windowed layers may have fewer cells
    for (const LayerShape& layer : model.shape.layers) {
      if (layer.window > 0) continue;
      smallest += static_cast<double>(cells) *
                  static_cast<double>(
                      ggml_row_size(config.type_k, int64_t{layer.kv_heads} * layer.head_dim_k) +
                      ggml_row_size(config.type_v, int64_t{layer.kv_heads} * layer.head_dim_v));
    }
    if (options.kv_memory > 0 && smallest > static_cast<double>(options.kv_memory)) {
      throw MemoryError("llama.cpp's cache of " + std::to_string(cells) + " cells needs at least " +
                        std::to_string(static_cast<int64_t>(smallest)) + " bytes; the limit is " +
                        std::to_string(options.kv_memory));
    }
    return cells;
  }

  // llama.cpp reuses the cells of tokens that have left every window, so a sequence can be
  // shortened only as far as the windows of its new last token are still there.
  void CheckWindow(int64_t position) const {
    const int64_t window = llama_model_n_swa(model_.model.get());
    const int64_t first = llama_memory_seq_pos_min(context_.memory(), 0);
    if (position > 0 && window > 0 && first > std::max<int64_t>(0, position - window)) {
      throw StateError("llama.cpp has dropped tokens that a sliding window of " +
                       std::to_string(window) + " needs before position " +
                       std::to_string(position));
    }
  }

  const Model::Impl& model_;
  NativeConfig config_;
  int64_t cells_;
  int threads_;
  SizeProbe size_;
  Context context_;
};

// A small context computes the piece once and then only moves its positions on. What it saves is
// loaded into a second sequence here, whose cells are then given to the first: loading replaces a
// sequence, and the state of the whole depth at once would take the memory of the cache again.
void NativeDriver::Fill(std::span<const Token> piece, int64_t depth) {
  Begin(0, depth);
  const int64_t n = std::min<int64_t>(static_cast<int64_t>(piece.size()), depth);
  Context source(model_.model.get(), {.cells = n,
                                      .ubatch = static_cast<int>(n),
                                      .threads = threads_,
                                      .type_k = config_.type_k,
                                      .type_v = config_.type_v,
                                      .flash = config_.flash});
  if (!llama_memory_can_shift(source.memory())) {
    throw StateError(
        "llama.cpp cannot move the positions of this model's tokens, so its cache "
        "cannot be filled without computing them");
  }
  const ErrorLog log;
  if (const int code = source.Decode(piece.first(n), 0, LogitRows::kNone); code != 0)
    ThrowDecodeError(code, log.suffix());
  std::vector<uint8_t> state;
  for (int64_t at = 0; at < depth; at += n) {
    if (at > 0) llama_memory_seq_add(source.memory(), 0, -1, -1, static_cast<llama_pos>(n));
    if (at + n > depth) {
      llama_memory_seq_rm(source.memory(), 0, static_cast<llama_pos>(depth), -1);
    }
    state.resize(llama_state_seq_get_size(source.get(), 0));
    const size_t saved = llama_state_seq_get_data(source.get(), state.data(), state.size(), 0);
    if (saved == 0 || llama_state_seq_set_data(context_.get(), state.data(), saved, 1) == 0) {
      throw StateError("llama.cpp did not take the state of " + std::to_string(n) +
                       " tokens at position " + std::to_string(at) + log.suffix());
    }
    llama_memory_seq_cp(context_.memory(), 1, 0, -1, -1);
    llama_memory_seq_rm(context_.memory(), 1, -1, -1);
  }
}

}  // namespace

bool IsNativeCache(const std::string& cache) { return cache.starts_with(kPrefix); }

std::unique_ptr<Driver> MakeNativeDriver(const Model::Impl& model, const SessionOptions& options) {
  return std::make_unique<NativeDriver>(model, options);
}

}  // namespace palu::llama
