#include "cache/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
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

// The pages of one side of one head, as pointers.
struct SidePages {
  std::vector<const uint8_t*> pages;
  const PagePlan* plan = nullptr;

  void Collect(const Segment& segment, int head, bool is_v, int64_t first_page, int64_t n) {
    const PageLayout& layout = segment.store->layout();
    plan = (is_v ? layout.v : layout.k)[head];
    const size_t offset = (is_v ? layout.v_offset : layout.k_offset)[head];
    pages.resize(static_cast<size_t>(n));
    for (int64_t p = 0; p < n; ++p) pages[p] = segment.store->page(first_page + p) + offset;
  }
};

// ------------------------------------------------------------------------------------------------
// decode

struct DecodeTask {
  int kv_head;
  const Segment* segment;
  int64_t first_page, pages;
};

// Scores, softmax and weighted latents of one run of tokens, for all rows of one KV head.
// sums: [rows]; acc: [rows][acc_stride], zeroed by the caller.
void DecodeRun(const AttendCall& call, const DecodeTask& task, const PreparedQueries& queries,
               int rows, RowSum* sums, float* acc, int64_t acc_stride) {
  const KernelTable& kernels = Active();
  const Segment& segment = *task.segment;
  const int page_tokens = segment.store->layout().page_tokens;
  const int64_t tokens = task.pages * page_tokens;  // with the empty end of the last page
  const int64_t first = segment.first + task.first_page * page_tokens;
  const int64_t count = std::min(tokens, segment.first + segment.count - first);
  thread_local SidePages side;
  thread_local std::vector<float> scores, scratch;

  side.Collect(segment, task.kv_head, false, task.first_page, task.pages);
  const int rank_k = side.plan->rank;
  scores.resize(static_cast<size_t>(rows) * tokens);
  scratch.resize(static_cast<size_t>(kMaxFusedRows + 2) * (rank_k + 16));
  const float* const q = segment.encoded ? queries.latent.data() : queries.exact.data();
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
    AddMeanScores(call, task.kv_head, queries, rows, first, tokens, scores.data(), tokens);
  }
  for (int r = 0; r < rows; ++r) {
    float* const row = scores.data() + r * tokens;
    FinishScores(call, r / call.group, segment.encoded ? queries.mean_dot[r] : 0.0f, first, count,
                 row);
    sums[r].max = kernels.max(row, count);
    std::fill(row + count, row + tokens, 0.0f);
    if (sums[r].max == kMinusInf) {
      std::fill(row, row + count, 0.0f);
      continue;
    }
    sums[r].sum = kernels.exp_sum(row, count, sums[r].max);
    if (segment.encoded) sums[r].encoded_sum = sums[r].sum;
  }
  side.Collect(segment, task.kv_head, true, task.first_page, task.pages);
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

// Runs of one KV head's visible tokens.
void AddDecodeTasks(const AttendCall& call, int kv_head, std::vector<DecodeTask>& tasks) {
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
      tasks.push_back({kv_head, &segment, p, n});
    }
  }
}

// Adds the partial sums of a head's tasks, in order, and writes its rows.
void MergeHead(const AttendCall& call, int kv_head, int rows, const std::vector<DecodeTask>& tasks,
               size_t first_task, size_t last_task, const RowSum* partial_sums,
               const float* partial_acc, int64_t acc_stride) {
  const int dim = call.shape().head_dim_v;
  const bool encoded = call.sequence.encoded_tokens() > 0;
  const int rank = encoded ? call.sequence.codec()->v.head(kv_head).rank() : 0;
  thread_local std::vector<float> exact, latent;
  exact.assign(static_cast<size_t>(rows) * dim, 0.0f);
  latent.assign(static_cast<size_t>(rows) * rank, 0.0f);
  std::vector<RowSum> sums(static_cast<size_t>(rows));
  for (int r = 0; r < rows; ++r) {
    for (size_t t = first_task; t < last_task; ++t)
      sums[r].max = std::max(sums[r].max, partial_sums[t * rows + r].max);
    if (sums[r].max == kMinusInf) continue;
    for (size_t t = first_task; t < last_task; ++t) {
      const RowSum& part = partial_sums[t * rows + r];
      if (part.max == kMinusInf) continue;
      const float weight = std::exp(part.max - sums[r].max);
      sums[r].sum += weight * part.sum;
      sums[r].encoded_sum += weight * part.encoded_sum;
      const float* const from = partial_acc + (t * rows + r) * acc_stride;
      const bool is_latent = tasks[t].segment->encoded;
      float* const to = is_latent ? latent.data() + r * rank : exact.data() + r * dim;
      for (int c = 0; c < (is_latent ? rank : dim); ++c) to[c] += weight * from[c];
    }
  }
  FinishRows(call, kv_head, 0, rows, sums.data(), encoded ? latent.data() : nullptr, rank,
             exact.data());
}

void AttendDecode(const AttendCall& call) {
  const int heads = call.shape().kv_heads;
  const int rows = static_cast<int>(call.n) * call.group;
  std::vector<DecodeTask> tasks;
  std::vector<size_t> first_task;
  for (int h = 0; h < heads; ++h) {
    first_task.push_back(tasks.size());
    AddDecodeTasks(call, h, tasks);
  }
  first_task.push_back(tasks.size());
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
  if (queries.size() < static_cast<size_t>(heads)) queries.resize(static_cast<size_t>(heads));
  sums.assign(tasks.size() * rows, RowSum());
  acc.assign(tasks.size() * rows * acc_stride, 0.0f);

  ParallelFor(threads, heads,
              [&](int64_t h) { queries[h].Prepare(call, static_cast<int>(h), 0, rows); });
  ParallelFor(threads, static_cast<int64_t>(tasks.size()), [&](int64_t t) {
    DecodeRun(call, tasks[t], queries[tasks[t].kv_head], rows, sums.data() + t * rows,
              acc.data() + t * rows * acc_stride, acc_stride);
  });
  ParallelFor(threads, heads, [&](int64_t h) {
    MergeHead(call, static_cast<int>(h), rows, tasks, first_task[h], first_task[h + 1], sums.data(),
              acc.data(), acc_stride);
  });
}

// -----------------------------------------------------------------------------------------------
// prefill

// One block of queries of one KV head over all tokens, tile by tile, with an online softmax.
class PrefillTask {
 public:
  PrefillTask(const AttendCall& call, int kv_head, int64_t first_query, int64_t queries)
      : call_(call),
        head_(kv_head),
        first_row_(first_query * call.group),
        rows_(queries * call.group) {
    int64_t unused;
    call.Visible(first_query, begin_, unused);
    call.Visible(first_query + queries - 1, unused, end_);
  }

  void Run() {
    queries_.Prepare(call_, head_, first_row_, rows_);
    const int dim = call_.shape().head_dim_v;
    const bool encoded = call_.sequence.encoded_tokens() > 0;
    rank_ = encoded ? call_.sequence.codec()->v.head(head_).rank() : 0;
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
    FinishRows(call_, head_, first_row_, rows_, sums_.data(), encoded ? latent_.data() : nullptr,
               rank_, exact_.data());
  }

 private:
  const uint8_t* Side(const Segment& segment, int64_t token, bool is_v, int& block) const {
    const PageLayout& layout = segment.store->layout();
    block = static_cast<int>(token % layout.page_tokens / kBlockTokens);
    return segment.store->page(token / layout.page_tokens) +
           (is_v ? layout.v_offset : layout.k_offset)[head_];
  }

  // Tokens [at, at + count) of the segment; `at` is a multiple of 32.
  void Tile(const Segment& segment, int64_t at, int64_t count) {
    const KernelTable& kernels = Active();
    const PageLayout& layout = segment.store->layout();
    const int64_t blocks = (count + kBlockTokens - 1) / kBlockTokens;
    const PagePlan& k_plan = *layout.k[head_];
    const PagePlan& v_plan = *layout.v[head_];
    scores_.resize(static_cast<size_t>(rows_) * kTileTokens);
    tile_.resize(static_cast<size_t>(
        std::max(k_plan.rank * kBlockTokens, v_plan.rank * static_cast<int>(kTileTokens))));
    const float* const q = segment.encoded ? queries_.latent.data() : queries_.exact.data();
    for (int64_t i = 0; i < blocks; ++i) {
      int block;
      const uint8_t* side = Side(segment, at + i * kBlockTokens, false, block);
      kernels.decode_block(k_plan, side, block, tile_.data());
      kernels.gemm({.a = q,
                    .lda = k_plan.rank,
                    .b = tile_.data(),
                    .ldb = kBlockTokens,
                    .c = scores_.data() + i * kBlockTokens,
                    .ldc = kTileTokens,
                    .m = static_cast<int>(rows_),
                    .n = kBlockTokens,
                    .k = k_plan.rank});
    }
    if (segment.encoded) {
      AddMeanScores(call_, head_, queries_, rows_, segment.first + at, blocks * kBlockTokens,
                    scores_.data(), kTileTokens);
    }
    float* const acc = segment.encoded ? latent_.data() : exact_.data();
    Softmax(segment, at, count);
    for (int64_t i = 0; i < blocks; ++i) {
      int block;
      const uint8_t* side = Side(segment, at + i * kBlockTokens, true, block);
      kernels.decode_block_tokens(v_plan, side, block,
                                  tile_.data() + i * kBlockTokens * v_plan.rank, v_plan.rank);
    }
    kernels.gemm({.a = scores_.data(),
                  .lda = kTileTokens,
                  .b = tile_.data(),
                  .ldb = v_plan.rank,
                  .c = acc,
                  .ldc = v_plan.rank,
                  .m = static_cast<int>(rows_),
                  .n = v_plan.rank,
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
      FinishScores(call_, (first_row_ + r) / call_.group,
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
  const int head_;
  const int64_t first_row_, rows_;
  int64_t begin_ = 0, end_ = 0;  // tokens that any of the queries may see
  int rank_ = 0;
  PreparedQueries queries_;
  std::vector<RowSum> sums_;
  std::vector<float> exact_, latent_;  // [rows][Dv], [rows][rank]
  std::vector<float> scores_;          // [rows][kTileTokens]
  std::vector<float> tile_;            // K: [rank][32]; V: [tokens][rank]
};

void AttendPrefill(const AttendCall& call) {
  const int64_t per_block = std::max<int64_t>(1, kTileRows / call.group);
  const int64_t blocks = (call.n + per_block - 1) / per_block;
  // The last queries see the most tokens: start with them.
  ParallelFor(call.sequence.context().threads, blocks * call.shape().kv_heads, [&](int64_t task) {
    const int64_t block = blocks - 1 - task / call.shape().kv_heads;
    const int head = static_cast<int>(task % call.shape().kv_heads);
    PrefillTask(call, head, block * per_block, std::min(per_block, call.n - block * per_block))
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
