// File: cells.h - what CellCache points to: blocks of 32 cells, exact or packed.
//
// A frame is what a packed page holds, one or more blocks. Every frame of a stream has its place in
// one region of address space per epoch; a slab, the frames of 256 cells, takes memory while one of
// them is packed. Exact blocks have memory of their own.
//
// An epoch is a codec and what it packed. The first is fitted on the first tokens. Now and then
// another is fitted on tokens as they are packed, and tried on those that follow; where it loses
// clearly less, an epoch begins with it (docs/decisions/0008-epochs.md).
#ifndef PALU_SRC_CACHE_CELLS_H_
#define PALU_SRC_CACHE_CELLS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "base/memory.h"
#include "base/region.h"
#include "cache/page_coder.h"
#include "cache/page_store.h"
#include "cache/token_view.h"
#include "palu/cell_cache.h"
#include "palu/errors.h"

namespace palu {

class Cells {
 public:
  Cells(std::shared_ptr<LayerContext> context, int64_t cells, int streams);

  void Put(bool values, const CellRows& rows);
  void Seal();
  void Attend(const CellAttendArgs& args, const MutableTensor& out) const;
  void Read(bool values, int64_t first, int64_t n, float* out) const;
  void Copy(bool values, int64_t from, int64_t to, int64_t n);
  void Turn(const RopeParams& rope, const int32_t* shifts, int64_t first, int64_t n);
  void Clear();
  CacheStats Stats() const;

  int64_t cells() const { return cells_; }
  int streams() const { return static_cast<int>(streams_.size()); }
  const LayerContext& context() const { return *context_; }
  void SetThreads(int threads) { context_->threads = threads; }

 private:
  struct Block {
    BufferPtr exact;                // null: packed, or never written
    int epoch = -1;                 // that packed it; -1: exact, or never written
    uint32_t keys = 0, values = 0;  // cells that have one, as bits
    int64_t written = 0;            // the stream's clock at the last key
    BufferPtr list;                 // of positions that do not follow each other

    bool encoded() const { return epoch >= 0; }
  };
  // The packed frames of one epoch in one stream.
  struct Packed {
    Region pages;                       // empty until the first is there
    CountedVector<MemoryCharge> slabs;  // 0 bytes: no frame of it is packed

    explicit Packed(const MemoryAccountPtr& account)
        : slabs(CountingAllocator<MemoryCharge>(account)) {}
  };
  struct Stream {
    CountedVector<Block> blocks;              // up to the last that was ever written
    CountedVector<BlockPositions> positions;  // of each block
    CountedVector<int64_t> open;              // the exact blocks
    std::vector<Packed> packed;               // by epoch
    int64_t clock = 0;                        // keys that came

    explicit Stream(const MemoryAccountPtr& account);
  };
  struct Epoch {
    std::shared_ptr<const LayerCodec> codec;
    int64_t frames = 0;  // that are packed by it, of all streams
  };
  // On the way to another epoch.
  struct Refit {
    int64_t packed = 0;    // tokens, since the last trial
    int64_t interval = 0;  // so many of them before the next sample
    std::unique_ptr<FitSample> sample;
    std::shared_ptr<const LayerCodec> candidate;
    int64_t tried = 0;       // tokens
    double lost[2][2] = {};  // keys and values: by the candidate, by the newest
  };
  // A place: stream, and cell within it.
  struct Place {
    int stream;
    int64_t cell;
  };

  const LayerShape& shape() const { return context_->shape; }
  int dim(bool values) const { return values ? shape().head_dim_v : shape().head_dim_k; }
  int64_t width(bool values) const { return int64_t{shape().kv_heads} * dim(values); }
  bool fitted() const { return newest_ >= 0; }
  const LayerCodec& codec(int epoch) const { return *epochs_[static_cast<size_t>(epoch)].codec; }
  int64_t frame_blocks() const {
    return fitted() ? codec(newest_).layout.page_tokens / kBlockTokens : 1;
  }
  int64_t frame_cells() const { return frame_blocks() * kBlockTokens; }
  int64_t slab_frames() const { return PagesAtOnce(frame_cells()); }
  size_t slab_bytes(int epoch) const { return slab_frames() * codec(epoch).layout.page_bytes; }
  const PageLayout& exact_layout() const { return context_->window.layout; }
  Place Find(int64_t cell) const;
  // The place of the first of n cells that must lie in one stream. Errors: InputError.
  Place FindRange(int64_t first, int64_t n) const;
  const uint8_t* Page(const Stream& stream, int epoch, int64_t frame) const;
  uint8_t* Page(Stream& stream, int epoch, int64_t frame);

  // Places for rows to come: blocks that exist and are exact.
  void Open(const CellRows& rows);
  void EnsureBlocks(Stream& stream, int64_t blocks);
  void EnsureSlab(Stream& stream, int epoch, int64_t frame);
  void MakeExact(Stream& stream, int64_t block);
  // The blocks of a frame become nothing; the slab goes with its last frame.
  void Drop(Stream& stream, int64_t frame);
  // The blocks of a packed frame become exact.
  void Reopen(Stream& stream, int64_t frame);
  // One side of a packed frame, decoded into exact pages.
  void DecodeFrame(const Stream& stream, int64_t frame, bool values, uint8_t* const* exact) const;
  void Write(bool values, const CellRows& rows);
  // Rows [begin, end) of them into exact blocks.
  void WriteRows(bool values, const CellRows& rows, int64_t begin, int64_t end);
  // Read for cells [cell, end) of one block.
  void ReadBlock(bool values, const Stream& stream, int64_t cell, int64_t end, float* out) const;
  void SetPosition(Stream& stream, int64_t cell, int32_t position);
  // Turns the keys of an exact page. shifts: [32], 0 leaves a cell as it is.
  void TurnPage(const RopeParams& rope, const int32_t* shifts, uint8_t* page) const;
  void TurnFrame(const RopeParams& rope, Stream& stream, int64_t frame, const int32_t* shifts,
                 int64_t first, int64_t n);
  void CopyFrame(bool values, const Stream& from, int64_t from_frame, Stream& to, int64_t to_frame);
  void CopyBlock(bool values, const Stream& from, int64_t from_block, Stream& to, int64_t to_block);
  void CopyPositions(const Stream& from, int64_t from_block, Stream& to, int64_t to_block);

  // cells_seal.cc
  // Forgets a list of positions that follow each other.
  void Normalise(Stream& stream, int64_t block);
  bool IsSink(const Stream& stream, int64_t cell) const;
  bool HasSink(const Stream& stream, int64_t block) const;
  bool Due(const Stream& stream, int64_t frame) const;
  std::vector<int64_t> DueFrames(const Stream& stream) const;
  void Encode(Stream& stream, const std::vector<int64_t>& frames);

  // cells_epochs.cc
  // Places of the rows that a fit would take; fewer than it needs if it cannot be made yet.
  std::vector<Place> RowsToFit() const;
  // The rows at these places, whose blocks are exact, for a fit.
  FitRows RowsAt(std::vector<Place> places) const;
  // Begins the first epoch if there are enough rows for its fit.
  void Fit();
  void Begin(std::shared_ptr<const LayerCodec> codec);
  // Where another epoch could begin: its place among epochs_, or -1.
  int FreeEpoch() const;
  // Takes frames that are being packed into the sample, or tries the candidate on them. lost: what
  // they lose by the newest codec.
  void Watch(const Stream& stream, const std::vector<int64_t>& frames, const double lost[2]);
  void Sample(const Stream& stream, const std::vector<int64_t>& frames);
  void Try(const Stream& stream, const std::vector<int64_t>& frames, const double lost[2]);
  // The epoch goes on, and the next trial is further away.
  void EndTrial();
  // f(), which changes nothing if it throws MemoryError; then again without the sample and the
  // candidate, if there are any: what is stored goes first.
  template <typename F>
  void MakingRoom(const F& f) {
    try {
      f();
    } catch (const MemoryError&) {
      if (!refit_.sample && !refit_.candidate) throw;
      EndTrial();
      f();
    }
  }

  // Blocks [begin, end) of a stream that are there, without those that `hidden(block)` names.
  template <typename F>
  void FillView(const Stream& stream, int64_t begin, int64_t end, int64_t cells, const F& hidden,
                TokenView& view) const;

  std::shared_ptr<LayerContext> context_;  // its own, for the threads
  int64_t cells_;                          // per stream
  std::vector<Stream> streams_;
  std::vector<Epoch> epochs_;  // at most kMostEpochs; those without frames are free
  int newest_ = -1;            // -1 until the first fit
  Refit refit_;
  RopeParams rope_;
  Energy k_energy_, v_energy_;  // of all that was packed
};

}  // namespace palu

#endif  // PALU_SRC_CACHE_CELLS_H_
