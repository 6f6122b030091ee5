// File: driver.h - what runs the batches of a session: our caches, or llama.cpp's own.
#ifndef PALU_ADAPTERS_LLAMA_DRIVER_H_
#define PALU_ADAPTERS_LLAMA_DRIVER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "llama/context.h"
#include "llama/model_impl.h"
#include "llama/session.h"

namespace palu::llama {

class Driver {
 public:
  virtual ~Driver() = default;

  // Starts a Decode of `tokens` tokens after `position`, in one or more steps.
  // Errors: MemoryError, StateError when it is known that they do not fit; then nothing has
  // changed.
  virtual void Begin(int64_t position, int64_t tokens) = 0;
  // One batch. Errors leave it half done.
  virtual void Step(std::span<const Token> tokens, int64_t position, LogitRows rows) = 0;
  // Ends the Decode: keeps the steps, or takes all of them back. `position` is the one given to
  // Begin.
  virtual void Commit() = 0;
  virtual void Rollback(int64_t position) = 0;
  // Drops the last n of `position` tokens; all or nothing. Errors: StateError.
  virtual void Trim(int64_t position, int64_t n) = 0;
  virtual void Clear() = 0;
  // Puts `depth` tokens into an empty cache (Session::FillForBenchmark): those of `piece`, which
  // are at most a ubatch, again and again. Errors leave it half done.
  virtual void Fill(std::span<const Token> piece, int64_t depth) = 0;

  virtual SessionStats Stats(int64_t position) const = 0;
  virtual std::string cache_text() const = 0;
  virtual llama_context* context() const = 0;
  virtual void SetObserver(KvObserver observer) = 0;
  virtual void SetQueryObserver(QueryObserver observer) = 0;
  virtual std::span<const KVCache> caches() const = 0;
};

std::unique_ptr<Driver> MakeOwnDriver(const Model::Impl& model, const SessionOptions& options);
// For options.cache = "llama:TYPE[,fa=on|off]".
std::unique_ptr<Driver> MakeNativeDriver(const Model::Impl& model, const SessionOptions& options);
bool IsNativeCache(const std::string& cache);

// Turns a code of llama_decode other than 0 into an exception.
[[noreturn]] void ThrowDecodeError(int code, const std::string& log);

}  // namespace palu::llama

#endif  // PALU_ADAPTERS_LLAMA_DRIVER_H_
