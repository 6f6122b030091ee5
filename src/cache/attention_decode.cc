// Attention of few queries: straight from packed pages, cut into runs of tokens that are merged in
// a fixed order.
#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <vector>

#include "base/threads.h"
#include "cache/attention_common.h"

namespace palu {
namespace {

// Of one task. Each starts with reads that nothing foresaw, so they are long, unless there would be
// few of them. What is long depends on what the call can see, never on the number of threads.
constexpr int64_t kRunTokens = 1024, kShortRunTokens = 512, kFewTasks = 16;
// Below so many multiply-adds a call is not worth waking threads.
constexpr int64_t kSerialWork = 1 << 18;

// The pages of one side of one head or unit, as pointers.
struct SidePages {
  std::vector<const uint8_t*> pages;
  const PagePlan* plan = nullptr;

  void Collect(const TokenView& view, const Segment& segment, int place, bool is_v,
               int64_t first_page, int64_t n) {
    const PageLayout& layout = *segment.layout;
    plan = (is_v ? layout.v : layout.k)[place];
    const size_t offset = (is_v ? layout.v_offset : layout.k_offset)[place];
    const uint8_t* const* const from = &view.pages[segment.page + first_page];
    pages.resize(static_cast<size_t>(n));
    for (int64_t p = 0; p < n; ++p) pages[p] = from[p] + offset;
  }

  // Asks for what will be read first, while something else is computed.
  void Fetch() const {
    constexpr size_t kFirstPages = 8, kFirstBytes = 256, kLine = 64;
    for (size_t p = 0; p < std::min(kFirstPages, pages.size()); ++p) {
      for (size_t i = 0; i < kFirstBytes; i += kLine) __builtin_prefetch(pages[p] + i);
      for (size_t i = plan->code_bytes(); i < plan->page_bytes(); i += kLine) {
        __builtin_prefetch(pages[p] + i);
      }
    }
  }
};

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
  const int page_tokens = segment.layout->page_tokens;
  const int64_t tokens = task.pages * page_tokens;  // with the empty end of the last page
  const int64_t first = segment.first + task.first_page * page_tokens;
  const int64_t count = std::min(tokens, segment.first + segment.count - first);
  const LatentQueries* const latents =
      segment.encoded() ? &queries.latents[static_cast<size_t>(segment.codec)] : nullptr;
  const int place = latents ? task.unit : task.head;
  const int64_t first_row = task.FirstRow(call, queries.rows);
  const int rows = static_cast<int>(task.Rows(call, queries.rows));
  const bool fast = call.view.context->config.fast;
  thread_local SidePages side;
  thread_local std::vector<float> scores, scratch;

  side.Collect(call.view, segment, place, false, task.first_page, task.pages);
  const int rank_k = side.plan->rank;
  scores.resize(static_cast<size_t>(rows) * tokens);
  scratch.resize(ScoreScratch(*side.plan, std::min(kMaxFusedRows, rows)));
  const float* const q = (latents ? latents->latent : queries.exact).data() + first_row * rank_k;
  for (int r = 0; r < rows; r += kMaxFusedRows) {
    kernels.score({.run = {side.plan, side.pages.data(), static_cast<int>(task.pages)},
                   .q = q + static_cast<int64_t>(r) * rank_k,
                   .q_stride = rank_k,
                   .rows = std::min(kMaxFusedRows, rows - r),
                   .out = scores.data() + r * tokens,
                   .out_stride = tokens,
                   .fast = fast,
                   .scratch = scratch.data()});
  }
  side.Collect(call.view, segment, place, true, task.first_page, task.pages);
  side.Fetch();
  if (latents) {
    AddMeanScores(call, task.unit, *latents, segment, task.first_page * page_tokens, tokens,
                  scores.data(), tokens);
  }
  for (int r = 0; r < rows; ++r) {
    float* const row = scores.data() + r * tokens;
    const int64_t query = r % queries.rows / call.group;
    // What is the same for all tokens need not be added to each, unless they are capped.
    const float mean_dot = latents ? latents->mean_dot[r] : 0.0f;
    const bool apart = call.args.soft_cap == 0;
    FinishScores(call, query, apart ? 0.0f : mean_dot, first, count, row);
    const float max = kernels.max(row, count);
    sums[r].max = apart ? max + mean_dot : max;
    std::fill(row + count, row + tokens, 0.0f);
    if (sums[r].max == kMinusInf) {
      std::fill(row, row + count, 0.0f);
      continue;
    }
    sums[r].sum = kernels.exp_sum(row, count, max);
  }
  scratch.resize(AccumulateScratch(*side.plan, std::min(kMaxFusedRows, rows)));
  for (int r = 0; r < rows; r += kMaxFusedRows) {
    kernels.accumulate({.run = {side.plan, side.pages.data(), static_cast<int>(task.pages)},
                        .p = scores.data() + r * tokens,
                        .p_stride = tokens,
                        .rows = std::min(kMaxFusedRows, rows - r),
                        .acc = acc + r * acc_stride,
                        .acc_stride = acc_stride,
                        .fast = fast,
                        .scratch = scratch.data()});
  }
}

// Runs of a unit's visible tokens, in token order.
void AddDecodeTasks(const AttendCall& call, int unit, std::vector<DecodeTask>& tasks) {
  int64_t begin, end, unused;
  call.Visible(0, begin, unused);
  call.Visible(call.n - 1, unused, end);
  const auto visible = static_cast<int64_t>(call.units.size()) * (end - begin);
  const int64_t run = visible < kFewTasks * kRunTokens ? kShortRunTokens : kRunTokens;
  for (const Segment& segment : call.view.segments) {
    const int page_tokens = segment.layout->page_tokens;
    const int64_t step = run / page_tokens;
    const int64_t pages = (segment.count + page_tokens - 1) / page_tokens;
    for (int64_t p = 0; p < pages; p += step) {
      const int64_t n = std::min(step, pages - p);
      const int64_t first = segment.first + p * page_tokens;
      if (first >= end || first + n * page_tokens <= begin) continue;
      if (segment.encoded()) {
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
  thread_local std::vector<float> exact;
  thread_local std::vector<LatentSums> latents;
  exact.assign(static_cast<size_t>(rows) * dim, 0.0f);
  latents.resize(call.view.codecs.size());
  for (size_t i = 0; i < latents.size(); ++i) {
    latents[i].Reset(rows, call.view.codecs[i]->v.unit(unit).rank());
  }
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
      const float* const from = partial_acc + place(task, r) * acc_stride;
      float* to = exact.data() + r * dim;
      int n = dim;
      if (task.segment->encoded()) {
        const auto codec = static_cast<size_t>(task.segment->codec);
        n = call.view.codecs[codec]->v.unit(unit).rank();
        to = latents[codec].latent.data() + r * n;
        latents[codec].weight[r] += weight * part.sum;
      }
      for (int c = 0; c < n; ++c) to[c] += weight * from[c];
    }
  }
  FinishRows(call, kv_head, 0, rows, sums.data(), latents, 0, exact.data());
}

}  // namespace

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
  int64_t acc_stride = call.shape().head_dim_v;
  for (const LayerCodec* codec : call.view.codecs) {
    acc_stride = std::max<int64_t>(acc_stride, codec->v.max_rank());
  }
  const int64_t work = call.view.size * heads * rows * acc_stride * 2;
  const int threads = work < kSerialWork ? 1 : call.view.context->threads;

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

  const Stage prepare{units,
                      [&](int64_t u) { queries[u].Prepare(call, static_cast<int>(u), 0, rows); }};
  const Stage run{static_cast<int64_t>(tasks.size()), [&](int64_t t) {
                    const int64_t first = tasks[t].first_sum;
                    DecodeRun(call, tasks[t], queries[tasks[t].unit], sums.data() + first,
                              acc.data() + first * acc_stride, acc_stride);
                  }};
  const Stage merge{heads, [&](int64_t h) {
                      const int u = call.unit_of_head(static_cast<int>(h));
                      const std::span<const DecodeTask> own(tasks.data() + first_task[u],
                                                            first_task[u + 1] - first_task[u]);
                      MergeHead(call, u, static_cast<int>(h), rows, own, sums.data(), acc.data(),
                                acc_stride);
                    }};
  ParallelStages(threads, std::array{prepare, run, merge});
}

}  // namespace palu
