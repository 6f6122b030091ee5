// Threads: results do not depend on their number, and different caches work at once. Small enough
// for ThreadSanitizer.
#include "base/threads.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <new>
#include <numeric>
#include <set>
#include <thread>

#include "test_util.h"

namespace palu {
namespace {

using namespace test;

constexpr int kHeads = 5, kDim = 64;

struct Session {
  Snapshot snapshot;
  std::vector<Floats> outputs;
  bool operator==(const Session&) const = default;
};

// A prompt in chunks, then tokens, with attention at each step.
Session RunOnce(const std::string& config, int threads, uint64_t seed, int64_t window = 0) {
  const Dims dims{2, kHeads, 300, kDim};
  const RopeParams rope = Rope(kDim);
  const Floats k = RopedKeys(dims, rope, seed), v = Gaussian(dims.size(), seed + 1);
  KVCache cache = MakeCache(config, kHeads, kDim,
                            {.window = static_cast<int>(window), .batch = 2, .threads = threads});
  Session run;
  for (int64_t at = 0; at < 300;) {
    const int64_t n = at < 280 ? 70 : 4;
    cache.Append(Slice(k, dims, at, n), Slice(v, dims, at, n), {.position = -1, .rope = &rope});
    const Dims qd{2, 2 * kHeads, n, kDim};
    run.outputs.push_back(Attend(cache, Gaussian(qd.size(), seed + at), qd));
    cache.Seal();
    at += n;
  }
  run.snapshot = Take(cache);
  return run;
}

class ThreadCounts : public testing::TestWithParam<std::string> {};

TEST_P(ThreadCounts, GiveTheSameBits) {
  const Session one = RunOnce(GetParam(), 1, 1);
  EXPECT_TRUE(AllFinite(one.outputs.back()));
  for (const int threads : {2, 3, 5, 8}) {
    EXPECT_TRUE(RunOnce(GetParam(), threads, 1) == one) << threads << " threads";
  }
}

TEST_P(ThreadCounts, GiveTheSameBitsInAWindow) {
  EXPECT_TRUE(RunOnce(GetParam(), 4, 2, 90) == RunOnce(GetParam(), 1, 2, 90));
}

INSTANTIATE_TEST_SUITE_P(Methods, ThreadCounts,
                         testing::Values("palu:fit_tokens=96,recent_tokens=20", "palu:reference",
                                         "palu:fit_tokens=96,quantize_values=false,group_size=64",
                                         "palu:fit_tokens=150,joint_heads=2,key_mean=rotated",
                                         "fp16", "kivi:recent_tokens=20", "svdq:fit_tokens=96",
                                         "rabitq:fit_tokens=96"),
                         [](const auto& info) { return "config" + std::to_string(info.index); });

// A long decode call is split into runs of tokens; the split must not show either.
TEST(ThreadRuns, LongDecodeGivesTheSameBits) {
  const Dims dims{1, 2, 3000, 32}, qd{1, 4, 1, 32};
  const Floats k = Gaussian(dims.size(), 3), v = Gaussian(dims.size(), 4),
               q = Gaussian(qd.size(), 5);
  const auto run = [&](int threads) {
    KVCache cache = MakeCache("palu:key_fit=prompt,fit_tokens=256", 2, 32, {.threads = threads});
    Feed(cache, k, dims, v, dims, 0, 3000);
    return Attend(cache, q, qd);
  };
  const Floats one = run(1);
  for (const int threads : {2, 3, 8}) EXPECT_EQ(run(threads), one);
}

// The rows of a long fit are summed in parts.
TEST(ThreadRuns, ALongFitGivesTheSameBits) {
  const Dims dims{1, 2, 1300, 32};
  const RopeParams rope = Rope(32);
  const Floats k = RopedKeys(dims, rope, 27), v = Gaussian(dims.size(), 28);
  const auto run = [&](int threads) {
    KVCache cache = MakeCache("palu:fit_tokens=1250", 2, 32, {.threads = threads});
    Feed(cache, k, dims, v, dims, 0, 1300, &rope);
    cache.Seal();
    EXPECT_GT(cache.Stats().encoded_tokens, 0);
    return Take(cache);
  };
  const Snapshot one = run(1);
  for (const int threads : {2, 3, 8}) EXPECT_EQ(run(threads), one);
}

// Threads that end and start again in every layer cost a decode step nine tenths of its speed on
// sixteen cores.
TEST(Pool, FewTasksLeaveTheOtherThreadsAlive) {
#ifndef PALU_OPENMP
  GTEST_SKIP() << "without OpenMP every call starts its own threads";
#endif
  std::mutex mutex;
  std::set<pid_t> seen;
  for (int call = 0; call < 20; ++call) {
    ParallelFor(4, call % 2 ? 2 : 16, [&](int64_t) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // so that all get some
      const std::lock_guard<std::mutex> lock(mutex);
      seen.insert(gettid());
    });
  }
  EXPECT_LE(seen.size(), 4u);
}

TEST(Pool, AStageSeesAllOfTheOneBefore) {
  for (const int threads : {1, 2, 5}) {
    std::vector<int> first(50), second(7);
    int sum = 0;
    const Stage stages[] = {
        {50, [&](int64_t i) { first[i] = static_cast<int>(i); }},
        {7, [&](int64_t i) { second[i] = std::accumulate(first.begin(), first.end(), 0); }},
        {1, [&](int64_t) { sum = std::accumulate(second.begin(), second.end(), 0); }}};
    ParallelStages(threads, stages);
    EXPECT_EQ(sum, 7 * 50 * 49 / 2) << threads << " threads";
  }
}

TEST(Pool, AfterAnErrorNoStageBegins) {
  for (const int threads : {1, 4}) {
    std::atomic<int> later{0};
    const Stage stages[] = {{8,
                             [](int64_t i) {
                               if (i == 3) throw std::bad_alloc();
                             }},
                            {8, [&](int64_t) { ++later; }}};
    EXPECT_THROW(ParallelStages(threads, stages), std::bad_alloc);
    EXPECT_EQ(later, 0) << threads << " threads";
  }
}

TEST(ThreadsAtOnce, DifferentCachesAreIndependent) {
  const std::string config = "palu:fit_tokens=96,recent_tokens=20";
  std::vector<Session> want, got(4);
  for (int i = 0; i < 4; ++i) want.push_back(RunOnce(config, 1, 10 + i));
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] { got[i] = RunOnce(config, 1 + i % 2, 10 + i); });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(got[i] == want[i]) << "cache " << i;
}

TEST(ThreadsAtOnce, LayersOfOneModelShareTheirAccount) {
  const Dims dims{1, 2, 300, 32};
  const RopeParams rope = Rope(32);
  const Floats k = RopedKeys(dims, rope, 20), v = Gaussian(dims.size(), 21);
  ModelShape shape = ModelShape::Uniform(4, 2, 32);
  shape.threads = 1;
  std::vector<KVCache> caches =
      KVCacheBuilder::ForModel(shape, KVCacheConfig::Parse("palu:fit_tokens=96,recent_tokens=20"));
  std::vector<std::thread> threads;
  for (KVCache& cache : caches) {
    threads.emplace_back([&] {
      for (int64_t at = 0; at < 300; at += 30) Feed(cache, k, dims, v, dims, at, 30, &rope);
      cache.Trim(40);
    });
  }
  for (std::thread& thread : threads) thread.join();
  int64_t sum = 0;
  for (const KVCache& cache : caches) sum += cache.nbytes();
  EXPECT_EQ(KVCacheBuilder::Memory(caches[0]).allocated_bytes, sum);
  EXPECT_EQ(Take(caches[0]), Take(caches[3]));
}

TEST(ThreadsAtOnce, ForksThatSharePages) {
  const Dims dims{1, 2, 400, 32};
  const RopeParams rope = Rope(32);
  const Floats k = RopedKeys(dims, rope, 22), v = Gaussian(dims.size(), 23);
  KVCache origin = MakeCache("palu:fit_tokens=96,recent_tokens=20", 2, 32);
  Feed(origin, k, dims, v, dims, 0, 205, &rope);
  const Snapshot before = Take(origin);
  std::vector<KVCache> forks;
  for (int i = 0; i < 4; ++i) forks.push_back(origin.Fork());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      // All write behind the same half-filled page and slab; one cuts into shared pages.
      if (i == 3) forks[i].Trim(60);
      for (int64_t at = 205; at < 385; at += 30) Feed(forks[i], k, dims, v, dims, at, 30, &rope);
      const Dims qd{1, 4, 1, 32};
      EXPECT_TRUE(AllFinite(Attend(forks[i], Gaussian(qd.size(), 24), qd)));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(Take(origin).k == before.k && Take(origin).v == before.v);
  EXPECT_TRUE(Take(forks[0]).k == Take(forks[1]).k);
  EXPECT_TRUE(Take(forks[0]).v == Take(forks[2]).v);
  EXPECT_EQ(forks[3].size(), 325);
}

// Const calls on one cache may overlap.
TEST(ThreadsAtOnce, ReadersOfOneCache) {
  const Dims dims{1, 2, 300, 32}, qd{1, 4, 2, 32};
  const RopeParams rope = Rope(32);
  const Floats k = RopedKeys(dims, rope, 25), v = Gaussian(dims.size(), 26),
               q = Gaussian(qd.size(), 27);
  KVCache cache = MakeCache("palu:fit_tokens=96,recent_tokens=20", 2, 32);
  Feed(cache, k, dims, v, dims, 0, 300, &rope);
  const Floats want = Attend(cache, q, qd);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 5; ++round) EXPECT_EQ(Attend(cache, q, qd), want);
      EXPECT_EQ(cache.Reconstruct().k.shape, dims.shape());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace palu
