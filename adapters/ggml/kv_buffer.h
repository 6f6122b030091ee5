// File: kv_buffer.h - one allocation of ggml: a KV cache of ours, or memory for a graph's results.
//
// llama.cpp allocates the cache of a context as one buffer of tensors cache_k_l<i> and
// cache_v_l<i>. Their addresses are reserved, and no page is ever put behind them: whoever reads or
// writes them directly crashes instead of computing with nothing. The rows are in one CellCache per
// layer.
#ifndef PALU_ADAPTERS_GGML_KV_BUFFER_H_
#define PALU_ADAPTERS_GGML_KV_BUFFER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ggml/abi.h"
#include "palu/palu.h"

namespace palu::ggml {

// One cache tensor: `width` values per cell, `cells` cells in each of `streams` streams.
struct KvSide {
  int layer = 0;
  bool values = false;
  int type = 0;  // nominal
  int64_t width = 0, cells = 0, streams = 0;
  size_t row_bytes = 0;  // nominal
};

// What the caches of a buffer hold together.
struct KvReport {
  int layers = 0;
  int64_t cells = 0, streams = 0;
  int64_t tokens = 0;  // of the layer with the most
  int64_t bytes = 0, peak_bytes = 0, fp16_bytes = 0;
};

class KvBuffer : public Buffer {
 public:
  // Null: the system has no address space left.
  static std::unique_ptr<KvBuffer> Make(const Host& host, size_t size);
  ~KvBuffer() override;

  void* Base() override { return base_; }
  bool InitTensor(ggml_tensor* tensor) override;
  void Memset(ggml_tensor* tensor, uint8_t value, size_t offset, size_t size) override;
  void Set(ggml_tensor* tensor, const void* data, size_t offset, size_t size) override;
  void Get(const ggml_tensor* tensor, void* data, size_t offset, size_t size) override;
  bool Copy(const ggml_tensor* src, ggml_tensor* dst) override;
  void Clear(uint8_t value) override;

  // The cache tensor that `t` is, or is a view of; null if it is none of this buffer.
  const KvSide* Side(const ggml_tensor* t) const;
  // What graphs tell of a layer before any is computed: the heads that a FLASH_ATTN_EXT node reads,
  // and how the keys that a SET_ROWS node writes are rotated. False: it contradicts what is known.
  bool LearnHeads(int layer, int kv_heads, int head_dim_k, int head_dim_v);
  void LearnRope(int layer, RopeParams rope);

  // The cells of a side's layer, made at the first call. Calls on them need lock().
  // Errors: those of KVCacheBuilder::CellsForModel; StateError (no graph has named its heads).
  CellCache& Cells(const KvSide& side);
  const RopeParams& Rope(const KvSide& side) const { return layers_.at(side.layer).rope; }
  std::unique_lock<std::mutex> lock() const { return std::unique_lock(mutex_); }
  void SetThreads(int threads);

  // Positions of the tokens that the running graph writes, kept from its first layer on: the tensor
  // they are in may be overwritten before the last. `found`: [n] or null, as this layer's graph has
  // them. Null: nobody knows.
  const int32_t* StepPositions(int layer, const int32_t* found, int64_t n);

  KvReport Report() const;

 private:
  struct Layer {
    std::optional<KvSide> k, v;
    LayerShape shape;
    RopeParams rope;
    std::unique_ptr<CellCache> cells;
  };

  KvBuffer(const Host& host, uint8_t* base, size_t size);
  void Build();
  // Bytes [at, at + size) of the nominal tensor.
  void ReadBytes(const KvSide& side, size_t at, size_t size, uint8_t* out);
  void WriteTokens(const KvSide& side, int64_t first, int64_t left, const uint8_t* in);
  void TellReserved();
  void PutRows(const KvSide& side, int64_t first, const std::vector<float>& rows);

  const Host& host_;
  uint8_t* base_;
  size_t size_;
  std::map<const void*, KvSide> sides_;  // by address
  std::map<int, Layer> layers_;          // by index
  bool reserved_ = false, built_ = false;
  int threads_ = 0;
  int last_layer_ = -1;
  std::vector<int32_t> step_positions_;
  mutable std::mutex mutex_;
};

// All buffers of the process that hold a cache.
std::vector<KvReport> AllReports();

}  // namespace palu::ggml

#endif  // PALU_ADAPTERS_GGML_KV_BUFFER_H_
