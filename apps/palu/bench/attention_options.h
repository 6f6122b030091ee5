// File: attention_options.h - what `palu bench attention` was asked for.
#ifndef PALU_APPS_BENCH_ATTENTION_OPTIONS_H_
#define PALU_APPS_BENCH_ATTENTION_OPTIONS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace palu::app {

// One layer of a model.
struct AttentionShape {
  int query_heads = 0, kv_heads = 0, head_dim = 0;

  std::string Name() const;  // "9x3x64"
};

// "HxKxD": query heads, KV heads, head_dim; H a multiple of K, D even. Errors: ConfigError.
AttentionShape ParseShape(std::string_view text);

// The cache whose time every other is compared with.
inline constexpr char kBaseCache[] = "fp16";

struct AttentionOptions {
  std::vector<AttentionShape> shapes;
  std::vector<int64_t> tokens = {1024, 8192, 32768};
  std::vector<std::string> caches = {kBaseCache, "palu", "llama:f16", "llama:f16,fa=off"};
  int prefill = 256;        // queries; 0 = decode only
  int repeat = 5;           // samples at least
  int threads = 0;          // 0 = all cores
  int64_t walk = 96 << 20;  // bytes of layers that a cache walks through before it repeats one
  int64_t memory = 0;       // limit of all layers together; 0 = three quarters of what is free
  bool no_limits = false;   // do not measure the machine first
  std::string json;
};

// Checks caches and shapes, and puts the base cache first where it is missing.
// Errors: ConfigError.
void CheckAttentionOptions(AttentionOptions& options);

}  // namespace palu::app

#endif  // PALU_APPS_BENCH_ATTENTION_OPTIONS_H_
