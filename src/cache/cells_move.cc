// Cells that move: copies from stream to stream, and keys that are turned to new positions.
#include <algorithm>
#include <cstring>
#include <limits>

#include "base/fp16.h"
#include "cache/cells.h"
#include "kernels/kernels.h"

namespace palu {
namespace {

// Every head's, or unit's, part of one side of a page.
void CopySide(const PageLayout& layout, bool values, const uint8_t* from, uint8_t* to) {
  const auto& plans = values ? layout.v : layout.k;
  const auto& offsets = values ? layout.v_offset : layout.k_offset;
  for (size_t i = 0; i < plans.size(); ++i) {
    std::memcpy(to + offsets[i], from + offsets[i], plans[i]->page_bytes());
  }
}

}  // namespace

void Cells::CopyPositions(const Stream& from, int64_t from_block, Stream& to, int64_t to_block) {
  const BlockPositions& source = from.positions[from_block];
  Block& block = to.blocks[to_block];
  BufferPtr list;
  if (source.list) {
    list = std::make_shared<Buffer>(context_->account, sizeof(int32_t) * kBlockTokens);
    std::memcpy(list->data(), source.list, sizeof(int32_t) * kBlockTokens);
  }
  block.list = std::move(list);
  to.positions[to_block] = source;
  if (block.list) {
    to.positions[to_block].list = reinterpret_cast<const int32_t*>(block.list->data());
  }
}

void Cells::CopyBlock(bool values, const Stream& from, int64_t from_block, Stream& to,
                      int64_t to_block) {
  const Block& source = from.blocks[from_block];
  Block& block = to.blocks[to_block];
  if (!values) CopyPositions(from, from_block, to, to_block);
  (values ? block.values : block.keys) = values ? source.values : source.keys;
  block.written = to.clock;
}

void Cells::CopyFrame(bool values, const Stream& from, int64_t from_frame, Stream& to,
                      int64_t to_frame) {
  const auto blocks = static_cast<int64_t>(from.blocks.size());
  const int64_t source = from_frame * frame_blocks(), target = to_frame * frame_blocks();
  const int64_t n = std::min(frame_blocks(), blocks - source);
  const int epoch = n > 0 ? from.blocks[source].epoch : -1;
  const bool packed = epoch >= 0;
  if (!values) {
    // What was there goes, with the values: theirs come next.
    const bool fits = target < static_cast<int64_t>(to.blocks.size()) && packed &&
                      to.blocks[target].epoch == epoch;
    if (!fits) Drop(to, to_frame);
    if (n <= 0) return;
    EnsureBlocks(to, target + n);
  }
  for (int64_t i = 0; i < n; ++i) {
    const Block& block = from.blocks[source + i];
    if (packed || !block.exact) continue;
    MakingRoom([&] { MakeExact(to, target + i); });
    CopySide(exact_layout(), values, block.exact->data(), to.blocks[target + i].exact->data());
    CopyBlock(values, from, source + i, to, target + i);
  }
  if (!packed) return;
  MakingRoom([&] { EnsureSlab(to, epoch, to_frame); });
  CopySide(codec(epoch).layout, values, Page(from, epoch, from_frame), Page(to, epoch, to_frame));
  if (to.blocks[target].epoch < 0) ++epochs_[static_cast<size_t>(epoch)].frames;
  for (int64_t i = 0; i < n; ++i) {
    to.blocks[target + i].epoch = epoch;
    CopyBlock(values, from, source + i, to, target + i);
  }
}

void Cells::Copy(bool values, int64_t from, int64_t to, int64_t n) {
  const Place a = FindRange(from, n), b = FindRange(to, n);
  if (a.stream == b.stream && a.cell == b.cell) return;
  const bool aligned = a.cell % frame_cells() == 0 && b.cell % frame_cells() == 0 &&
                       (n % frame_cells() == 0 || (a.cell + n == cells_ && b.cell + n == cells_));
  if (aligned && a.stream != b.stream) {
    for (int64_t i = 0; i < PagesFor(n, static_cast<int>(frame_cells())); ++i) {
      CopyFrame(values, streams_[a.stream], a.cell / frame_cells() + i, streams_[b.stream],
                b.cell / frame_cells() + i);
    }
    return;
  }
  // Row by row: what was never written is not copied.
  const Stream& source = streams_[a.stream];
  std::vector<int64_t> cells;
  std::vector<int32_t> positions;
  std::vector<float> rows(static_cast<size_t>(n * width(values))), put;
  Read(values, from, n, rows.data());
  for (int64_t i = 0; i < n; ++i) {
    const int64_t cell = a.cell + i, block = cell / kBlockTokens;
    if (block >= static_cast<int64_t>(source.blocks.size())) break;
    const uint32_t set = values ? source.blocks[block].values : source.blocks[block].keys;
    if ((set >> (cell % kBlockTokens) & 1) == 0) continue;
    cells.push_back(to + i);
    const auto t = static_cast<int>(cell % kBlockTokens);
    positions.push_back(static_cast<int32_t>(source.positions[block].at(t)));
    put.insert(put.end(), &rows[i * width(values)], &rows[i * width(values)] + width(values));
  }
  if (cells.empty()) return;
  const RopeParams rope = rope_;
  Put(values, {.cells = cells.data(),
               .n = static_cast<int64_t>(cells.size()),
               .rows = put.data(),
               .positions = values ? nullptr : positions.data(),
               .rope = values ? nullptr : &rope});
}

void Cells::TurnPage(const RopeParams& rope, const int32_t* shifts, uint8_t* page) const {
  const PagePlan& plan = context_->window.k;
  std::vector<float> tile(static_cast<size_t>(kBlockTokens) * plan.rank);
  const float limit =
      context_->method->window_codec() == Codec::kF32 ? std::numeric_limits<float>::max() : kMaxF16;
  for (int h = 0; h < shape().kv_heads; ++h) {
    uint8_t* const side = page + exact_layout().k_offset[h];
    Active().decode_block_tokens(plan, side, 0, tile.data(), plan.rank);
    for (int t = 0; t < kBlockTokens; ++t) {
      if (shifts[t] == 0) continue;
      float* const row = &tile[static_cast<size_t>(t) * plan.rank];
      Unrotate(rope, -int64_t{shifts[t]}, row, 1, plan.rank);
      for (int d = 0; d < plan.rank; ++d) row[d] = std::clamp(row[d], -limit, limit);
      WriteExactRow(plan, row, plan.rank, t, side);
    }
  }
}

// shifts[0] is that of cell `first` of the stream; n of them.
void Cells::TurnFrame(const RopeParams& rope, Stream& stream, int64_t frame, const int32_t* shifts,
                      int64_t first, int64_t n) {
  const int64_t begin = frame * frame_cells();
  const auto shift = [&](int64_t cell) {
    return cell >= first && cell < first + n ? shifts[cell - first] : 0;
  };
  bool turns = false;
  for (int64_t c = begin; c < begin + frame_cells(); ++c) turns |= shift(c) != 0;
  if (!turns) return;
  const int epoch = stream.blocks[frame * frame_blocks()].epoch;
  const bool packed = epoch >= 0;
  std::vector<BufferPtr> decoded;
  std::vector<uint8_t*> pages;
  for (int64_t i = 0; i < frame_blocks(); ++i) {
    if (packed) {
      decoded.push_back(
          std::make_shared<Buffer>(context_->account, exact_layout().page_bytes + kReadPadding));
    }
    const size_t block = static_cast<size_t>(frame * frame_blocks() + i);
    const bool exact = block < stream.blocks.size() && stream.blocks[block].exact;
    pages.push_back(packed ? decoded.back()->data()
                           : (exact ? stream.blocks[block].exact->data() : nullptr));
  }
  if (packed) DecodeFrame(stream, frame, false, pages.data());
  for (int64_t i = 0; i < frame_blocks(); ++i) {
    if (!pages[i]) continue;
    const int64_t block = frame * frame_blocks() + i;
    int32_t turned[kBlockTokens] = {};
    for (int t = 0; t < kBlockTokens; ++t) {
      const int64_t cell = block * kBlockTokens + t;
      if (shift(cell) == 0 || (stream.blocks[block].keys >> t & 1) == 0) continue;
      turned[t] = shift(cell);
      const int64_t at = stream.positions[block].at(t) + shift(cell);
      SetPosition(stream, cell, static_cast<int32_t>(std::max<int64_t>(0, at)));
    }
    TurnPage(rope, turned, pages[i]);
  }
  if (!packed) return;
  for (int64_t i = 0; i < frame_blocks(); ++i) Normalise(stream, frame * frame_blocks() + i);
  for (size_t u = 0; u < codec(epoch).units.size(); ++u) {
    EncodeSide(*context_, codec(epoch), pages.data(), &stream.positions[frame * frame_blocks()],
               static_cast<int>(u), false, Page(stream, epoch, frame));
  }
}

void Cells::Turn(const RopeParams& rope, const int32_t* shifts, int64_t first, int64_t n) {
  CheckRope(shape(), rope);
  const Place place = FindRange(first, n);
  Stream& stream = streams_[place.stream];
  const auto blocks = static_cast<int64_t>(stream.blocks.size());
  const int64_t frames = std::min((place.cell + n - 1) / frame_cells() + 1,
                                  (blocks + frame_blocks() - 1) / frame_blocks());
  for (int64_t f = place.cell / frame_cells(); f < frames; ++f) {
    TurnFrame(rope, stream, f, shifts, place.cell, n);
  }
}

}  // namespace palu
