#include "llama/session.h"

#include <ggml-backend.h>

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "ggml/abi_threads.h"
#include "llama/driver.h"
#include "llama/model_impl.h"
#include "llama/self_test.h"
#include "palu/errors.h"

namespace palu::llama {
namespace {

constexpr int kMaxUbatch = 4096;
constexpr int kMaxThreads = 512;
constexpr int64_t kMaxPosition = std::numeric_limits<int32_t>::max();  // llama_pos

void CheckRange(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  throw ConfigError(std::string(name) + " is " + std::to_string(value) +
                    "; allowed: " + std::to_string(low) + ".." + std::to_string(high));
}

void CheckOptions(const Model::Impl& model, const SessionOptions& options) {
  CheckRange("threads", options.threads, 0, kMaxThreads);
  CheckRange("ubatch", options.ubatch, 1, kMaxUbatch);
  CheckRange("context", options.context, 0, kMaxPosition);
  CheckRange("kv_memory", options.kv_memory, 0, std::numeric_limits<int64_t>::max());
  const bool wants_long = options.context > model.file.original_context;
  if (model.file.long_rope && options.context > 0 && wants_long != model.long_factors) {
    throw ConfigError("context is " + std::to_string(options.context) +
                      ", but the model was loaded with " + (model.long_factors ? "long" : "short") +
                      " RoPE factors; load it for this context (ModelOptions::context)");
  }
}

}  // namespace

struct Session::Impl {
  std::shared_ptr<const Model> model;
  SessionOptions options;
  std::unique_ptr<Driver> driver;
  int64_t position = 0;
  bool broken = false;            // a batch failed and could not be taken back
  std::vector<float> all_logits;  // kAll
  const float* logits = nullptr;
  int64_t logit_rows = 0;

  void CheckTokens(std::span<const Token> tokens) const;
  // Returns false when `progress` stopped it before the end.
  bool RunSteps(std::span<const Token> tokens, LogitRows rows,
                const std::function<bool(int64_t)>& progress);
  void KeepLogits(LogitRows rows, int64_t done, int64_t n);
};

void Session::Impl::CheckTokens(std::span<const Token> tokens) const {
  if (broken) throw StateError("an earlier batch failed half way; clear the session first");
  if (tokens.empty()) throw InputError("there are no tokens to decode");
  const int vocabulary = model->info().vocabulary;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= 0 && tokens[i] < vocabulary) continue;
    throw InputError("token " + std::to_string(i) + " is " + std::to_string(tokens[i]) +
                     "; allowed: 0.." + std::to_string(vocabulary - 1));
  }
  if (static_cast<int64_t>(tokens.size()) > kMaxPosition - position) {
    throw InputError("positions beyond " + std::to_string(kMaxPosition) + " are not supported");
  }
}

void Session::Impl::KeepLogits(LogitRows rows, int64_t done, int64_t n) {
  const int64_t vocabulary = model->info().vocabulary;
  if (rows == LogitRows::kLast) {
    logits = llama_get_logits_ith(driver->context(), -1);
    logit_rows = 1;
  } else if (rows == LogitRows::kAll && all_logits.empty()) {
    logits = llama_get_logits(driver->context());
    logit_rows = n;
  } else if (rows == LogitRows::kAll) {
    std::copy_n(llama_get_logits(driver->context()), n * vocabulary,
                all_logits.begin() + done * vocabulary);
    logits = all_logits.data();
    logit_rows = done + n;
  }
}

bool Session::Impl::RunSteps(std::span<const Token> tokens, LogitRows rows,
                             const std::function<bool(int64_t)>& progress) {
  const auto total = static_cast<int64_t>(tokens.size());
  for (int64_t done = 0; done < total;) {
    const int64_t n = std::min<int64_t>(options.ubatch, total - done);
    const bool last = done + n == total;
    const LogitRows wanted = rows == LogitRows::kLast && !last ? LogitRows::kNone : rows;
    driver->Step(tokens.subspan(done, n), position, wanted);
    KeepLogits(wanted, done, n);
    position += n;
    done += n;
    if (progress && !progress(done) && !last) return false;
  }
  return true;
}

Session::Session(std::shared_ptr<const Model> model, const SessionOptions& options)
    : impl_(std::make_unique<Impl>()) {
  if (model == nullptr) throw ConfigError("a session needs a model");
  CheckOptions(model->impl(), options);
  impl_->options = options;
  impl_->model = std::move(model);
  const Model::Impl& shared = impl_->model->impl();
  if (IsNativeCache(options.cache)) {
    impl_->driver = MakeNativeDriver(shared, options);
    return;
  }
  KVCacheConfig::Parse(options.cache);  // a mistake in it comes before the work
  if (options.self_test) {
    const std::string difference = SelfTest(shared, ResolveThreads(options.threads));
    if (!difference.empty()) {
      throw FormatError(shared.info.path + " (" + shared.info.architecture +
                        ") cannot be run: " + difference);
    }
  }
  impl_->driver = MakeOwnDriver(shared, options);
}

Session::~Session() = default;

bool Session::Decode(std::span<const Token> tokens, LogitRows rows,
                     const std::function<bool(int64_t)>& progress) {
  Impl& s = *impl_;
  s.CheckTokens(tokens);
  s.logits = nullptr;
  s.logit_rows = 0;
  const int64_t start = s.position;
  // The logits of a single batch stay where llama.cpp has them: a row may have a megabyte.
  const bool gathers =
      rows == LogitRows::kAll && static_cast<int64_t>(tokens.size()) > s.options.ubatch;
  const size_t kept = gathers ? tokens.size() * static_cast<size_t>(s.model->info().vocabulary) : 0;
  try {
    s.all_logits.resize(kept);
  } catch (const std::exception&) {
    throw MemoryError("no memory for the logits of " + std::to_string(tokens.size()) + " tokens");
  }
  s.driver->Begin(start, static_cast<int64_t>(tokens.size()));
  try {
    const bool complete = s.RunSteps(tokens, rows, progress);
    s.driver->Commit();
    return complete;
  } catch (...) {
    s.logits = nullptr;
    s.logit_rows = 0;
    s.position = start;
    try {
      s.driver->Rollback(start);
    } catch (...) {
      s.broken = true;
    }
    throw;
  }
}

std::span<const float> Session::Logits(int64_t row) const {
  if (row < 0 || row >= impl_->logit_rows) {
    throw InputError("logit row " + std::to_string(row) + "; the last Decode kept " +
                     std::to_string(impl_->logit_rows));
  }
  const int64_t vocabulary = impl_->model->info().vocabulary;
  return {impl_->logits + row * vocabulary, static_cast<size_t>(vocabulary)};
}

int64_t Session::logit_rows() const { return impl_->logit_rows; }
int64_t Session::position() const { return impl_->position; }

void Session::Trim(int64_t n) {
  if (n < 0 || n > impl_->position) {
    throw StateError("cannot trim " + std::to_string(n) + " of " + std::to_string(impl_->position) +
                     " tokens");
  }
  if (n == 0) return;
  impl_->driver->Trim(impl_->position, n);
  impl_->position -= n;
}

void Session::Clear() {
  impl_->driver->Clear();
  impl_->position = 0;
  impl_->broken = false;
}

void Session::FillForBenchmark(std::span<const Token> piece, int64_t depth) {
  Impl& s = *impl_;
  s.CheckTokens(piece);
  if (static_cast<int64_t>(piece.size()) > s.options.ubatch) {
    throw InputError("a piece of " + std::to_string(piece.size()) + " tokens; allowed: 1.." +
                     std::to_string(s.options.ubatch));
  }
  if (depth < 0 || depth > kMaxPosition) {
    throw InputError("depth is " + std::to_string(depth) + "; allowed: 0.." +
                     std::to_string(kMaxPosition));
  }
  if (s.position != 0 || !s.options.fillable) {
    throw StateError(s.position != 0 ? "only an empty session can be filled"
                                     : "the session was not made to be filled");
  }
  if (depth == 0) return;
  try {
    s.driver->Fill(piece, depth);
    s.position = depth;
  } catch (...) {
    s.driver->Clear();
    throw;
  }
}

SessionStats Session::Stats() const { return impl_->driver->Stats(impl_->position); }
bool Session::own_cache() const { return !IsNativeCache(impl_->options.cache); }
std::string Session::cache_text() const { return impl_->driver->cache_text(); }
const Model& Session::model() const { return *impl_->model; }
void Session::SetObserver(KvObserver observer) { impl_->driver->SetObserver(std::move(observer)); }
void Session::SetQueryObserver(QueryObserver observer) {
  impl_->driver->SetQueryObserver(std::move(observer));
}
std::span<const KVCache> Session::caches() const { return impl_->driver->caches(); }

bool SharesThreads() {
  static const bool shares = [] {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (cpu == nullptr) return true;
    const void* const code = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu),
                                                               "ggml_backend_set_n_threads");
    return code == nullptr ||
           ggml::ShareOpenMp(reinterpret_cast<const void*>(&SharesThreads), code);
  }();
  return shares;
}

}  // namespace palu::llama
