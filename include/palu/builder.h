// File: builder.h - the caches of a whole model.
#ifndef PALU_BUILDER_H_
#define PALU_BUILDER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "palu/cache.h"
#include "palu/cell_cache.h"
#include "palu/config.h"

namespace palu {

struct ModelShape {
  std::vector<LayerShape> layers;  // layers may differ in heads, head_dim and window
  int64_t context = 0;   // positions the context can reach (averaging of key moments); 0 = 32768
  int batch = 1;         // sequences per cache, B
  int threads = 0;       // OpenMP threads of each call; 0 = all
  std::string model;     // name of the model, which that in a basis file has to equal; empty = any
  bool partial = false;  // `layers` are some of the model's; a basis file may have others

  // n equal layers.
  static ModelShape Uniform(int n_layers, int kv_heads, int head_dim);
};

// What the caches of one builder have allocated together: the allocator's own count.
struct MemoryReport {
  int64_t allocated_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t limit_bytes = 0;  // 0 = none
};

// Makes one cache per layer; the C++ twin of the reference's KVCacheBuilder.for_model(model,
// config).
class KVCacheBuilder {
 public:
  // Errors: ConfigError (options that do not fit the shape), InputError (shape out of range),
  // FormatError (a basis file that cannot be read or is of another model).
  // Layers with a sliding window are packed as windowed_bits says, whatever the method's bits.
  static std::vector<KVCache> ForModel(const ModelShape& shape, const KVCacheConfig& config);
  // The same for caches of numbered cells: `streams` x `cells` in every layer, 1 or more of each.
  // shape.batch must be 1.
  static std::vector<CellCache> CellsForModel(const ModelShape& shape, const KVCacheConfig& config,
                                              int64_t cells, int streams);
  // Bytes that the caches of ForModel will hold after `tokens` tokens per sequence, without making
  // them: exact up to a percent or two, but for ranks that only the data decides
  // (energy_threshold), where full rank is taken. Cost: one fit per kind of layer on made-up
  // moments. Errors: as ForModel.
  static int64_t EstimateBytes(const ModelShape& shape, const KVCacheConfig& config,
                               int64_t tokens);
  // Memory of all caches that share the accounting of `cache`: those made by the same call, and
  // their forks.
  static MemoryReport Memory(const KVCache& cache);
  static MemoryReport Memory(const CellCache& cache);
};

}  // namespace palu

#endif  // PALU_BUILDER_H_
