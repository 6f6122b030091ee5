#include "cache/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "base/threads.h"
#include "cache/attention_common.h"

namespace palu {
namespace {

constexpr int64_t kRunTokens = 1024;                // of one decode task
constexpr int64_t kSubRunTokens = 256;              // of one accumulate call
constexpr int64_t kTileTokens = 256;                // of one prefill tile
constexpr int64_t kTileRows = 192;                  // queries * group of one prefill task, about
constexpr int64_t kDecodeRows = 2 * kMaxFusedRows;  // at most, to go over packed pages directly
// Below so many multiply-adds a call is not worth waking threads.
constexpr int64_t kSerialWork = 1 << 18;

// The pages of one side of one head or unit, as pointers.
struct SidePages {
  std::vector<const uint8_t*> pages;
  const PagePlan* plan = nullptr;

  void Collect(const Segment& segment, int place, bool is_v, int64_t first_page, int64_t n) {
    const PageLayout& layout = segment.store->layout();
    plan = (is_v ? layout.v : layout.k)[place];
    const size_t offset = (is_v ? layout.v_offset : layout.k_offset)[place];
    pages.resize(static_cast<size_t>(n));
    for (int64_t p = 0; p < n; ++p) pages[p] = segment.store->page(first_page + p) + offset;
  }
};

// ------------------------------------------------------------------------------------------------
// decode

// A run of pages, for all rows of a unit if they are encoded, else for those of one head.
struct DecodeTask {
  int unit;
  int head;  // -1: all of the unit
  const Segment* segment;
  int64_t first_page, pages;
  int64_t first_sum = 0;  // of its rows among all partial sums

  // Where its rows start among those of the unit, and how many there are.
  int64_t FirstRow(const AttendCall& call, int64_t rows) const {
    return head < 0 ? 0 : (head - call.units[unit].first) * rows;
  }
  int64_t Rows(const AttendCall& call, int64_t rows) const {
    return head < 0 ? (call.units[unit].last - call.units[unit].first) * rows : rows;
  }
};

// Scores, softmax and weighted latents of one run of tokens. rows: of one head. sums: [task's
// rows]; acc: [task's rows][acc_stride], zeroed by the caller.
void DecodeRun(const AttendCall& call, const DecodeTask& task, const PreparedQueries& queries,
               RowSum* sums, float* acc, int64_t acc_stride) {
  const KernelTable& kernels = Active();
  const Segment& segment = *task.segment;
  const int page_tokens = segment.store->layout().page_tokens;
  const int64_t tokens = task.pages * page_tokens;  // with the empty end of the last page
  const int64_t first = segment.first + task.first_page * page_tokens;
  const int64_t count = std::min(tokens, segment.first + segment.count - first);
  const int place = segment.encoded ? task.unit : task.head;
  const int64_t first_row = task.FirstRow(call, queries.rows);
  const int rows = static_cast<int>(task.Rows(call, queries.rows));
  thread_local SidePages side;
  thread_local std::vector<float> scores, scratch;

  side.Collect(segment, place, false, task.first_page, task.pages);
  const int rank_k = side.plan->rank;
  scores.resize(static_cast<size_t>(rows) * tokens);
  scratch.resize(static_cast<size_t>(kMaxFusedRows + 2) * (rank_k + 16));
  const float* const q =
      (segment.encoded ? queries.latent : queries.exact).data() + first_row * rank_k;
  for (int r = 0; r < rows; r += kMaxFusedRows) {
    kernels.score({.run = {side.plan, side.pages.data(), static_cast<int>(task.pages)},
                   .q = q + static_cast<int64_t>(r) * rank_k,
                   .q_stride = rank_k,
                   .rows = std::min(kMaxFusedRows, rows - r),
                   .out = scores.data() + r * tokens,
                   .out_stride = tokens,
                   .scratch = scratch.data()});
  }
  if (segment.encoded) {
    AddMeanScores(call, task.unit, queries, first, tokens, scores.data(), tokens);
  }
  for (int r = 0; r < rows; ++r) {
    float* const row = scores.data() + r * tokens;
    const int64_t query = r % queries.rows / call.group;
    FinishScores(call, query, segment.encoded ? queries.mean_dot[r] : 0.0f, first, count, row);
    sums[r].max = kernels.max(row, count);
    std::fill(row + count, row + tokens, 0.0f);
    if (sums[r].max == kMinusInf) {
      std::fill(row, row + count, 0.0f);
      continue;
    }
    sums[r].sum = kernels.exp_sum(row, count, sums[r].max);
    if (segment.encoded) sums[r].encoded_sum = sums[r].sum;
  }
  side.Collect(segment, place, true, task.first_page, task.pages);
  const int64_t step = std::max<int64_t>(1, kSubRunTokens / page_tokens);
  const int groups = side.plan->raw ? 1 : side.plan->groups();
  scratch.resize(static_cast<size_t>(2 * step * groups) * (side.plan->rank + 16) +
                 step * groups * kMaxFusedRows);
  for (int r = 0; r < rows; r += kMaxFusedRows) {
    for (int64_t p = 0; p < task.pages; p += step) {
      kernels.accumulate({.run = {side.plan, side.pages.data() + p,
                                  static_cast<int>(std::min(step, task.pages - p))},
                          .p = scores.data() + r * tokens + p * page_tokens,
                          .p_stride = tokens,
                          .rows = std::min(kMaxFusedRows, rows - r),
                          .acc = acc + r * acc_stride,
                          .acc_stride = acc_stride,
                          .scratch = scratch.data()});
    }
  }
}

// Runs of a unit's visible tokens, in token order.
void AddDecodeTasks(const AttendCall& call, int unit, std::vector<DecodeTask>& tasks) {
  int64_t begin, end, unused;
  call.Visible(0, begin, unused);
  call.Visible(call.n - 1, unused, end);
  for (const Segment& segment : call.segments) {
    const int page_tokens = segment.store->layout().page_tokens;
    const int64_t step = kRunTokens / page_tokens;
    const int64_t pages = (segment.count + page_tokens - 1) / page_tokens;
    for (int64_t p = 0; p < pages; p += step) {
      const int64_t n = std::min(step, pages - p);
      const int64_t first = segment.first + p * page_tokens;
      if (first >= end || first + n * page_tokens <= begin) continue;
      if (segment.encoded) {
        tasks.push_back({unit, -1, &segment, p, n});
      } else {
        for (int h = call.units[unit].first; h < call.units[unit].last; ++h) {
          tasks.push_back({unit, h, &segment, p, n});
        }
      }
    }
  }
}

// Adds the partial sums of a head's tasks, in order, and writes its rows.
void MergeHead(const AttendCall& call, int unit, int kv_head, int64_t rows,
               std::span<const DecodeTask> tasks, const RowSum* partial_sums,
               const float* partial_acc, int64_t acc_stride) {
  const int dim = call.shape().head_dim_v;
  const bool encoded = call.sequence.encoded_tokens() > 0;
  const int rank = encoded ? call.sequence.codec()->v.unit(unit).rank() : 0;
  thread_local std::vector<float> exact, latent;
  exact.assign(static_cast<size_t>(rows) * dim, 0.0f);
  latent.assign(static_cast<size_t>(rows) * rank, 0.0f);
  std::vector<RowSum> sums(static_cast<size_t>(rows));
  const int64_t in_unit = (kv_head - call.units[unit].first) * rows;
  const auto has = [&](const DecodeTask& task) { return task.head < 0 || task.head == kv_head; };
  // Place of row r among the partial sums of a task.
  const auto place = [&](const DecodeTask& task, int64_t r) {
    return task.first_sum + (task.head < 0 ? in_unit : 0) + r;
  };
  for (int64_t r = 0; r < rows; ++r) {
    for (const DecodeTask& task : tasks) {
      if (has(task)) sums[r].max = std::max(sums[r].max, partial_sums[place(task, r)].max);
    }
    if (sums[r].max == kMinusInf) continue;
    for (const DecodeTask& task : tasks) {
      if (!has(task)) continue;
      const RowSum& part = partial_sums[place(task, r)];
      if (part.max == kMinusInf) continue;
      const float weight = std::exp(part.max - sums[r].max);
      sums[r].sum += weight * part.sum;
      sums[r].encoded_sum += weight * part.encoded_sum;
      const float* const from = partial_acc + place(task, r) * acc_stride;
      const bool is_latent = task.segment->encoded;
      float* const to = is_latent ? latent.data() + r * rank : exact.data() + r * dim;
      for (int c = 0; c < (is_latent ? rank : dim); ++c) to[c] += weight * from[c];
    }
  }
  FinishRows(call, kv_head, 0, rows, sums.data(), encoded ? latent.data() : nullptr, rank,
             exact.data());
}

void AttendDecode(const AttendCall& call) {
  const int heads = call.shape().kv_heads, units = static_cast<int>(call.units.size());
  const int64_t rows = call.n * call.group;
  std::vector<DecodeTask> tasks;
  std::vector<size_t> first_task;
  for (int u = 0; u < units; ++u) {
    first_task.push_back(tasks.size());
    AddDecodeTasks(call, u, tasks);
  }
  first_task.push_back(tasks.size());
  int64_t all_sums = 0;
  for (DecodeTask& task : tasks) {
    task.first_sum = all_sums;
    all_sums += task.Rows(call, rows);
  }
  const LayerCodec* codec = call.sequence.codec();
  const int64_t acc_stride = std::max(call.shape().head_dim_v, codec ? codec->v.max_rank() : 0);
  const int64_t work = call.sequence.size() * heads * rows * acc_stride * 2;
  const int threads = work < kSerialWork ? 1 : call.sequence.context().threads;

  thread_local std::vector<PreparedQueries> queries_storage;
  thread_local std::vector<RowSum> sums_storage;
  thread_local std::vector<float> acc_storage;
  // Bound to references here: inside the lambdas the names would mean the worker's own
  // thread_local.
  std::vector<PreparedQueries>& queries = queries_storage;
  std::vector<RowSum>& sums = sums_storage;
  std::vector<float>& acc = acc_storage;
  if (queries.size() < static_cast<size_t>(units)) queries.resize(static_cast<size_t>(units));
  sums.assign(static_cast<size_t>(all_sums), RowSum());
  acc.assign(static_cast<size_t>(all_sums * acc_stride), 0.0f);

  ParallelFor(threads, units,
              [&](int64_t u) { queries[u].Prepare(call, static_cast<int>(u), 0, rows); });
  ParallelFor(threads, static_cast<int64_t>(tasks.size()), [&](int64_t t) {
    const int64_t first = tasks[t].first_sum;
    DecodeRun(call, tasks[t], queries[tasks[t].unit], sums.data() + first,
              acc.data() + first * acc_stride, acc_stride);
  });
  ParallelFor(threads, units, [&](int64_t u) {
    const std::span<const DecodeTask> own(tasks.data() + first_task[u],
                                          first_task[u + 1] - first_task[u]);
    for (int h = call.units[u].first; h < call.units[u].last; ++h) {
      MergeHead(call, static_cast<int>(u), h, rows, own, sums.data(), acc.data(), acc_stride);
    }
  });
}

// -----------------------------------------------------------------------------------------------
// prefill

// One block of queries of the heads of a unit over all tokens, tile by tile, with an online
// softmax. Rows are those of PreparedQueries: one head after the other.
class PrefillTask {
 public:
  PrefillTask(const AttendCall& call, int unit, int64_t first_query, int64_t queries)
      : call_(call),
        unit_(unit),
        heads_(call.units[unit]),
        first_row_(first_query * call.group),
        head_rows_(queries * call.group),
        rows_(head_rows_ * (heads_.last - heads_.first)) {
    int64_t unused;
    call.Visible(first_query, begin_, unused);
    call.Visible(first_query + queries - 1, unused, end_);
  }

  void Run() {
    queries_.Prepare(call_, unit_, first_row_, head_rows_);
    const int dim = call_.shape().head_dim_v;
    const bool encoded = call_.sequence.encoded_tokens() > 0;
    rank_ = encoded ? call_.sequence.codec()->v.unit(unit_).rank() : 0;
    sums_.assign(static_cast<size_t>(rows_), RowSum());
    exact_.assign(static_cast<size_t>(rows_) * dim, 0.0f);
    latent_.assign(static_cast<size_t>(rows_) * rank_, 0.0f);
    for (const Segment& segment : call_.segments) {
      const int64_t from =
          std::max<int64_t>(begin_ - segment.first, 0) / kBlockTokens * kBlockTokens;
      const int64_t to = std::min(end_ - segment.first, segment.count);
      for (int64_t t = from; t < to; t += kTileTokens)
        Tile(segment, t, std::min(kTileTokens, to - t));
    }
    for (int h = heads_.first; h < heads_.last; ++h) {
      const int64_t row = (h - heads_.first) * head_rows_;
      FinishRows(call_, h, first_row_, head_rows_, &sums_[row],
                 encoded ? latent_.data() + row * rank_ : nullptr, rank_,
                 exact_.data() + row * dim);
    }
  }

 private:
  // Tokens [at, at + count) of the segment; `at` is a multiple of 32.
  void Tile(const Segment& segment, int64_t at, int64_t count) {
    const int64_t blocks = (count + kBlockTokens - 1) / kBlockTokens;
    scores_.resize(static_cast<size_t>(rows_) * kTileTokens);
    if (segment.encoded) {
      Score(segment, at, blocks, unit_, 0, rows_, queries_.latent.data());
      AddMeanScores(call_, unit_, queries_, segment.first + at, blocks * kBlockTokens,
                    scores_.data(), kTileTokens);
    } else {
      for (int h = heads_.first; h < heads_.last; ++h) {
        Score(segment, at, blocks, h, (h - heads_.first) * head_rows_, head_rows_,
              queries_.exact.data());
      }
    }
    Softmax(segment, at, count);
    if (segment.encoded) {
      Accumulate(segment, at, count, unit_, 0, rows_, latent_.data());
    } else {
      for (int h = heads_.first; h < heads_.last; ++h) {
        Accumulate(segment, at, count, h, (h - heads_.first) * head_rows_, head_rows_,
                   exact_.data());
      }
    }
  }

  const uint8_t* Side(const Segment& segment, int64_t token, int place, bool is_v,
                      int& block) const {
    const PageLayout& layout = segment.store->layout();
    block = static_cast<int>(token % layout.page_tokens / kBlockTokens);
    return segment.store->page(token / layout.page_tokens) +
           (is_v ? layout.v_offset : layout.k_offset)[place];
  }

  // Raw scores of rows [row, row + rows) against one head or unit. q: of all rows.
  void Score(const Segment& segment, int64_t at, int64_t blocks, int place, int64_t row,
             int64_t rows, const float* q) {
    const KernelTable& kernels = Active();
    const PagePlan& plan = *segment.store->layout().k[place];
    tile_.resize(static_cast<size_t>(plan.rank) * kBlockTokens);
    for (int64_t i = 0; i < blocks; ++i) {
      int block;
      const uint8_t* side = Side(segment, at + i * kBlockTokens, place, false, block);
      kernels.decode_block(plan, side, block, tile_.data());
      kernels.gemm({.a = q + row * plan.rank,
                    .lda = plan.rank,
                    .b = tile_.data(),
                    .ldb = kBlockTokens,
                    .c = scores_.data() + row * kTileTokens + i * kBlockTokens,
                    .ldc = kTileTokens,
                    .m = static_cast<int>(rows),
                    .n = kBlockTokens,
                    .k = plan.rank});
    }
  }

  // Adds the weighted values of one head or unit to rows [row, row + rows). acc: of all rows.
  void Accumulate(const Segment& segment, int64_t at, int64_t count, int place, int64_t row,
                  int64_t rows, float* acc) {
    const KernelTable& kernels = Active();
    const PagePlan& plan = *segment.store->layout().v[place];
    const int64_t blocks = (count + kBlockTokens - 1) / kBlockTokens;
    tile_.resize(static_cast<size_t>(plan.rank) * kTileTokens);
    for (int64_t i = 0; i < blocks; ++i) {
      int block;
      const uint8_t* side = Side(segment, at + i * kBlockTokens, place, true, block);
      kernels.decode_block_tokens(plan, side, block, tile_.data() + i * kBlockTokens * plan.rank,
                                  plan.rank);
    }
    kernels.gemm({.a = scores_.data() + row * kTileTokens,
                  .lda = kTileTokens,
                  .b = tile_.data(),
                  .ldb = plan.rank,
                  .c = acc + row * plan.rank,
                  .ldc = plan.rank,
                  .m = static_cast<int>(rows),
                  .n = plan.rank,
                  .k = static_cast<int>(count),
                  .accumulate = true});
  }

  // Scores of the tile become weights; sums and outputs so far are rescaled to the new maxima.
  void Softmax(const Segment& segment, int64_t at, int64_t count) {
    const KernelTable& kernels = Active();
    const int dim = call_.shape().head_dim_v;
    for (int64_t r = 0; r < rows_; ++r) {
      float* const row = scores_.data() + r * kTileTokens;
      RowSum& sum = sums_[r];
      FinishScores(call_, (first_row_ + r % head_rows_) / call_.group,
                   segment.encoded ? queries_.mean_dot[r] : 0.0f, segment.first + at, count, row);
      const float max = std::max(sum.max, kernels.max(row, count));
      if (max == kMinusInf) {
        std::fill(row, row + count, 0.0f);
        continue;
      }
      if (max > sum.max && sum.sum > 0) {
        const float factor = std::exp(sum.max - max);
        sum.sum *= factor;
        sum.encoded_sum *= factor;
        for (int d = 0; d < dim; ++d) exact_[r * dim + d] *= factor;
        for (int c = 0; c < rank_; ++c) latent_[r * rank_ + c] *= factor;
      }
      sum.max = max;
      const double added = kernels.exp_sum(row, count, max);
      sum.sum += added;
      if (segment.encoded) sum.encoded_sum += added;
    }
  }

  const AttendCall& call_;
  const int unit_;
  const HeadUnit heads_;
  const int64_t first_row_;         // of each head
  const int64_t head_rows_, rows_;  // of one head, of all
  int64_t begin_ = 0, end_ = 0;     // tokens that any of the queries may see
  int rank_ = 0;
  PreparedQueries queries_;
  std::vector<RowSum> sums_;
  std::vector<float> exact_, latent_;  // [rows][Dv], [rows][rank]
  std::vector<float> scores_;          // [rows][kTileTokens]
  std::vector<float> tile_;            // K: [rank][32]; V: [tokens][rank]
};

void AttendPrefill(const AttendCall& call) {
  int widest = 1;
  for (const HeadUnit& unit : call.units) widest = std::max(widest, unit.last - unit.first);
  const int64_t per_block = std::max<int64_t>(1, kTileRows / (call.group * widest));
  const int64_t blocks = (call.n + per_block - 1) / per_block;
  const auto units = static_cast<int64_t>(call.units.size());
  // The last queries see the most tokens: start with them.
  ParallelFor(call.sequence.context().threads, blocks * units, [&](int64_t task) {
    const int64_t block = blocks - 1 - task / units;
    PrefillTask(call, static_cast<int>(task % units), block * per_block,
                std::min(per_block, call.n - block * per_block))
        .Run();
  });
}

}  // namespace

void AttendSequence(const Sequence& sequence, const AttendArgs& args, int64_t b,
                    const MutableTensor& out) {
  const AttendCall call(sequence, args, b, out);
  if (call.n == 1 || call.n * call.group <= kDecodeRows) {
    AttendDecode(call);
  } else {
    AttendPrefill(call);
  }
}

}  // namespace palu
