// File: cell_cache.h - the KV cache of one layer whose tokens lie in numbered cells.
//
//   auto caches = palu::KVCacheBuilder::CellsForModel(shape, config, 4096, 1);
//   cache.PutKeys({.cells = cells, .n = n, .rows = k, .positions = positions, .rope = &rope});
//   cache.PutValues({.cells = cells, .n = n, .rows = v});
//   cache.Attend({.q = q, .cells = 512, .mask = mask, .mask_stride = 512}, out);
//
// For hosts that serve several sequences from one store, as llama.cpp does: every token gets a
// cell, cells are freed without a word and written anew later, and the mask of a call says who sees
// what. Cells are grouped into blocks of 32. A block is exact until all its cells are written and
// `recent_tokens` more tokens came to its stream; then it is packed. It is opened again when one of
// its cells is overwritten. Blocks with one of the first `sink_tokens` positions stay exact.
// The codec is fitted on the first tokens, and again where later ones are clearly unlike them; what
// the first one packed belongs to it until it is written anew.
#ifndef PALU_CELL_CACHE_H_
#define PALU_CELL_CACHE_H_

#include <cstdint>
#include <memory>

#include "palu/cache.h"
#include "palu/config.h"
#include "palu/rope.h"
#include "palu/tensor.h"

namespace palu {

// Rows of keys, or of values, for cells that may be anywhere.
struct CellRows {
  const int64_t* cells = nullptr;  // [n], distinct; cell c of stream s is s * cells_per_stream + c
  int64_t n = 0;
  const float* rows = nullptr;  // [n][stride]: all heads of a token side by side
  int64_t stride = 0;           // floats; 0 = heads * head_dim
  // Keys only: where each token stands in its sequence, >= 0; null = its cell's number within the
  // stream. A wrong position costs quality (key_mean=rotated, key_fit=averaged), never consistency.
  const int32_t* positions = nullptr;
  const RopeParams* rope = nullptr;  // keys only: how they were rotated; null = not at all
};

struct CellAttendArgs {
  ConstTensor q;      // [1, Hq, n, D]
  int64_t first = 0;  // cell that the mask's first column stands for; the first of a stream
  int64_t cells = 0;  // columns of the mask, at most cells_per_stream
  const uint16_t* mask = nullptr;  // fp16 [n][mask_stride], added to the scaled logits; -inf hides
  int64_t mask_stride = 0;
  float scale = 0;               // multiplies q.k; 0 = 1 / sqrt(head_dim_k)
  float soft_cap = 0;            // s -> cap * tanh(s / cap), before the mask; 0 = none
  const float* sinks = nullptr;  // [Hq], as in AttendArgs
};

class Cells;

// One layer, `streams` x `cells` cells. Movable.
// Threads: calls on one cache must not overlap; different caches are independent, those of one
// builder call too. Results do not depend on the number of threads.
class CellCache {
 public:
  CellCache(CellCache&&) noexcept;
  CellCache& operator=(CellCache&&) noexcept;
  ~CellCache();

  // First seals what earlier calls left, then writes. Keys come before the values of the same
  // cells; both before the attention that sees them. A chunk is exact for its own queries.
  // Errors: InputError (a cell that does not exist or is given twice, NaN, Inf, beyond fp16);
  // MemoryError, after which some of the cells may be written. Cost: one copy to fp16; an
  // overwritten packed block is decoded.
  void PutKeys(const CellRows& rows);
  void PutValues(const CellRows& rows);
  // Packs the blocks that are due; PutKeys does it too.
  void Seal();

  // out[0, h, i] = sum over cells of softmax(scale * q.k + mask) v. out: [1, Hq, n, Dv]. A query
  // that sees no cell gets zeros. Errors: InputError, StateError (a visible cell was never
  // written).
  void Attend(const CellAttendArgs& args, const MutableTensor& out) const;

  // Decoded rows of cells [first, first + n) of one stream: out [n][heads * head_dim]. Zeros where
  // nothing was written.
  void Read(bool values, int64_t first, int64_t n, float* out) const;
  // Cells [to, to + n) become copies of [from, from + n), one side at a time: keys first, then
  // values. Whole blocks keep their codes. Both ranges lie in one stream each. Errors: InputError;
  // MemoryError, after which some of the cells are copied and others are not.
  void Copy(bool values, int64_t from, int64_t to, int64_t n);
  // Turns the keys of cells [first, first + n) of one stream on by shifts[i] positions (context
  // shift); 0 leaves a cell as it is. Packed blocks are decoded, turned and packed again, one at a
  // time. Errors: InputError; MemoryError, after which some of the cells are turned: clear the
  // cache.
  void Turn(const RopeParams& rope, const int32_t* shifts, int64_t first, int64_t n);
  // Forgets everything, the basis too.
  void Clear();

  // OpenMP threads of later calls; 0 = all.
  void SetThreads(int threads);

  // tokens: cells with a key and a value. Bytes as in KVCache::Stats.
  CacheStats Stats() const;
  int64_t nbytes() const;
  int64_t cells_per_stream() const;
  int streams() const;
  const LayerShape& shape() const;

 private:
  friend class KVCacheBuilder;
  explicit CellCache(std::unique_ptr<Cells> cells);
  std::unique_ptr<Cells> cells_;
};

}  // namespace palu

#endif  // PALU_CELL_CACHE_H_
