#include "eval/protocol.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <span>
#include <utility>

#include "eval/score.h"
#include "interrupt.h"
#include "measure.h"
#include "palu/errors.h"
#include "parallel.h"
#include "progress.h"

namespace palu::app {
namespace {

constexpr int kUbatch = 512;
// The noise floor's batches where the reference itself has small ones.
constexpr int64_t kManyTokens = 64, kSmallBatch = 8;

// One cache on its way through a chunk.
struct Contestant {
  EvalRow row;
  std::unique_ptr<llama::Session> session;
  int64_t step = 1;  // tokens per batch in the scored half
  Cell cell;
};

LogitView ViewLogits(const llama::Session& session, int64_t rows) {
  LogitView view(rows);
  for (int64_t i = 0; i < rows; ++i) view[i] = session.Logits(i);
  return view;
}

// Says in the errors of a session which cache it was, and where.
template <class Body>
auto Named(const std::string& where, const Body& body) {
  try {
    return body();
  } catch (const ConfigError& e) {
    throw ConfigError(where + e.what());
  } catch (const InputError& e) {
    throw InputError(where + e.what());
  } catch (const MemoryError& e) {
    throw MemoryError(where + e.what());
  }
}

std::string Where(const EvalRow& row, int64_t chunk) {
  return fmt::format("cache {}, chunk {}: ", row.cache, chunk + 1);
}

[[noreturn]] void ThrowNotFinite(const EvalRow& row, int64_t chunk, int64_t token) {
  throw InputError(
      fmt::format("{}the logits of token {} are NaN or infinite; the cache or the model is broken",
                  Where(row, chunk), token));
}

// What is to be measured.
struct Plan {
  std::vector<EvalRow> rows;                // those that lack a cell
  std::vector<std::vector<size_t>> wanted;  // per chunk, which of `rows`
};

Plan MakePlan(const std::vector<EvalRow>& rows, size_t chunks, const CellMap& cells) {
  Plan plan;
  plan.wanted.resize(chunks);
  for (const EvalRow& row : rows) {
    bool lacks = false;
    for (size_t c = 0; c < chunks; ++c) {
      if (cells.contains({row.resolved, static_cast<int64_t>(c)})) continue;
      plan.wanted[c].push_back(plan.rows.size());
      lacks = true;
    }
    if (lacks) plan.rows.push_back(row);
  }
  return plan;
}

class Lockstep {
 public:
  Lockstep(const std::shared_ptr<const llama::Model>& model, const EvalOptions& o, const Plan& plan)
      : o_(o), threads_(ThreadCount(o.threads)) {
    const int64_t step = o.batch;
    const int64_t floor_step = step > kSmallBatch ? kFewTokens : kManyTokens;
    reference_ = Open(model, {kReferenceCache, kReferenceCache, false}, step);
    block_ = step;
    for (const EvalRow& row : plan.rows) {
      contestants_.push_back(Open(model, row, row.noise_floor ? floor_step : step));
      block_ = std::max(block_, contestants_.back().step);
    }
    progress_.emplace("evaluating", TotalCost(plan), ProgressUnit::kShare);
  }

  // Measures the rows that `wanted` names by their index. False after Ctrl-C.
  bool RunChunk(const Chunk& chunk, int64_t index, const std::vector<size_t>& wanted,
                CellMap& cells) {
    chunk_ = index;
    progress_->SetLabel(fmt::format("chunk {}", index + 1));
    std::vector<Contestant*> active;
    for (const size_t i : wanted) active.push_back(&contestants_[i]);
    if (!Fill(chunk, active) || !ScoreHalf(chunk, active)) return false;
    for (Contestant* c : active) {
      c->cell.size = SizeOf(*c->session);
      cells[{c->row.resolved, index}] = std::exchange(c->cell, {});
    }
    cells[{kReferenceCell, index}] = std::exchange(reference_.cell, {});
    return true;
  }

 private:
  Contestant Open(const std::shared_ptr<const llama::Model>& model, const EvalRow& row,
                  int64_t step) {
    return {row, OpenEvalSession(model, o_, row.cache, o_.context), step, {}};
  }

  // For the time left: the cost of a token beside that of a prompt's.
  static int64_t TokenCost(const Contestant& c) { return c.step > kSmallBatch ? 1 : 4; }

  int64_t TotalCost(const Plan& plan) const {
    const auto chunk = [&](const Contestant& c) {
      return o_.context / 2 + (o_.context - 1 - o_.context / 2) * TokenCost(c);
    };
    int64_t sum = 0;
    for (const std::vector<size_t>& wanted : plan.wanted) {
      if (!wanted.empty()) sum += chunk(reference_);
      for (const size_t i : wanted) sum += chunk(contestants_[i]);
    }
    return sum;
  }

  // The first half of a chunk into all caches.
  bool Fill(const Chunk& chunk, const std::vector<Contestant*>& active) {
    const auto half = std::span(chunk).first(chunk.size() / 2);
    const auto fill = [&](Contestant& c) {
      c.session->Clear();
      c.cell = {};
      const int64_t before = done_;
      const Timer timer;
      Named(Where(c.row, chunk_), [&] {
        c.session->Decode(half, llama::LogitRows::kNone, [&](int64_t n) {
          Advance(before + n - done_);
          return !Interrupted();
        });
      });
      c.cell.prompt_seconds = timer.Seconds();
      c.cell.prompt_tokens = static_cast<int64_t>(half.size());
      return !Interrupted();
    };
    if (!fill(reference_)) return false;
    return std::all_of(active.begin(), active.end(), [&](Contestant* c) { return fill(*c); });
  }

  // Block by block: the reference, then every cache in its own batches.
  bool ScoreHalf(const Chunk& chunk, const std::vector<Contestant*>& active) {
    const auto end = static_cast<int64_t>(chunk.size()) - 1;  // the last token predicts nothing
    for (int64_t at = static_cast<int64_t>(chunk.size() / 2); at < end; at += block_) {
      const int64_t n = std::min(block_, end - at);
      reference_block_.Clear();
      const auto each_batch = [&](Contestant& c, auto score) {
        for (int64_t first = 0; first < n && !Interrupted(); first += c.step) {
          const int64_t count = std::min(c.step, n - first);
          Decode(c, chunk, at + first, count);
          score(c, chunk, at, first, ViewLogits(*c.session, count));
        }
      };
      each_batch(reference_, std::bind_front(&Lockstep::SetReference, this));
      for (Contestant* c : active) each_batch(*c, std::bind_front(&Lockstep::Score, this));
      if (Interrupted()) return false;
    }
    return true;
  }

  void Decode(Contestant& c, const Chunk& chunk, int64_t at, int64_t n) {
    const Timer timer;
    Named(Where(c.row, chunk_),
          [&] { c.session->Decode(std::span(chunk).subspan(at, n), llama::LogitRows::kAll); });
    c.cell.scored_seconds += timer.Seconds();
    c.cell.scored_tokens += n;
    Advance(n * TokenCost(c));
  }

  // Logits of the positions from at + first on, in the block that starts at `at`.
  void SetReference(Contestant& c, const Chunk& chunk, int64_t at, int64_t first,
                    const LogitView& logits) {
    reference_block_.Add(logits, threads_);
    for (int64_t i = first; i < first + static_cast<int64_t>(logits.size()); ++i) {
      if (!reference_block_.finite(i)) ThrowNotFinite(c.row, chunk_, at + i);
      c.cell.nll.push_back(reference_block_.Nll(i, chunk[at + i + 1]));
    }
  }

  void Score(Contestant& c, const Chunk& chunk, int64_t at, int64_t first,
             const LogitView& logits) {
    const auto next = std::span(chunk).subspan(at + first + 1, logits.size());
    const std::vector<PositionScore> scores = reference_block_.Score(first, logits, next, threads_);
    for (size_t i = 0; i < scores.size(); ++i) {
      if (!scores[i].finite) ThrowNotFinite(c.row, chunk_, at + first + i);
      c.cell.kl.push_back(scores[i].kl);
      c.cell.nll.push_back(scores[i].nll);
      c.cell.same_top.push_back(scores[i].same_top);
    }
  }

  void Advance(int64_t cost) {
    done_ += cost;
    progress_->Update(done_);
  }

  const EvalOptions& o_;
  int threads_;
  std::optional<Progress> progress_;
  int64_t done_ = 0;   // cost
  int64_t chunk_ = 0;  // index, for messages
  Contestant reference_;
  std::vector<Contestant> contestants_;
  int64_t block_ = 1;  // positions whose reference is held at once
  ReferenceBlock reference_block_;
};

}  // namespace

std::unique_ptr<llama::Session> OpenEvalSession(const std::shared_ptr<const llama::Model>& model,
                                                const EvalOptions& o, const std::string& cache,
                                                int64_t context) {
  llama::SessionOptions options;
  options.cache = cache;
  options.threads = o.threads;
  options.context = context;
  options.ubatch = kUbatch;
  return Named(fmt::format("cache {}: ", cache),
               [&] { return std::make_unique<llama::Session>(model, options); });
}

std::vector<Chunk> CutChunks(const llama::Model& model, const EvalOptions& o,
                             std::string_view text) {
  if (o.chunks == 0) return {};
  const std::vector<llama::Token> tokens = model.Tokenize(text, false, false);
  Chunk start;
  if (model.info().adds_bos) start = model.Tokenize("", true, false);
  const int64_t body = o.context - static_cast<int64_t>(start.size());
  const int64_t whole = static_cast<int64_t>(tokens.size()) / body;
  if (whole == 0) {
    throw InputError(fmt::format("{} has {} tokens; one chunk of --ctx {} needs {}", o.file,
                                 tokens.size(), o.context, body));
  }
  if (whole < o.chunks) {
    spdlog::warn("{} has {} chunks of {} tokens, fewer than the {} of --chunks", o.file, whole,
                 o.context, o.chunks);
  }
  std::vector<Chunk> chunks(std::min(o.chunks, whole), start);
  for (size_t c = 0; c < chunks.size(); ++c) {
    const auto first = tokens.begin() + static_cast<int64_t>(c) * body;
    chunks[c].insert(chunks[c].end(), first, first + body);
  }
  return chunks;
}

bool MeasureCells(const std::shared_ptr<const llama::Model>& model, const EvalOptions& options,
                  const std::vector<EvalRow>& rows, const std::vector<Chunk>& chunks,
                  CellMap& cells, const std::function<void()>& finished) {
  const Plan plan = MakePlan(rows, chunks.size(), cells);
  if (plan.rows.empty()) return true;
  Lockstep lockstep(model, options, plan);
  for (size_t c = 0; c < chunks.size(); ++c) {
    const std::vector<size_t>& wanted = plan.wanted[c];
    if (wanted.empty()) continue;
    if (!lockstep.RunChunk(chunks[c], static_cast<int64_t>(c), wanted, cells)) return false;
    finished();
  }
  return true;
}

}  // namespace palu::app
