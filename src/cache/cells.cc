#include "cache/cells.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>

#include "base/fp16.h"
#include "base/tensor_io.h"
#include "base/threads.h"
#include "cache/attention_common.h"
#include "kernels/kernels.h"
#include "palu/errors.h"

namespace palu {

static_assert(kBlockTokens == 32, "cells of a block are the bits of a word");

namespace {

void CheckDistinct(const LayerShape& shape, const CellRows& rows) {
  const int64_t* const end = rows.cells + rows.n;
  if (std::adjacent_find(rows.cells, end, std::greater_equal()) == end) return;
  std::vector<int64_t> sorted(rows.cells, end);
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice == sorted.end()) return;
  throw InputError(Where(shape) + "cell " + std::to_string(*twice) +
                   " is given twice; the cells of a call must be distinct");
}

}  // namespace

Cells::Stream::Stream(const MemoryAccountPtr& account)
    : blocks(CountingAllocator<Block>(account)),
      positions(CountingAllocator<BlockPositions>(account)),
      open(CountingAllocator<int64_t>(account)) {}

Cells::Cells(std::shared_ptr<LayerContext> context, int64_t cells, int streams)
    : context_(std::move(context)), cells_(cells) {
  for (int s = 0; s < streams; ++s) streams_.emplace_back(context_->account);
}

void Cells::Clear() {
  for (Stream& stream : streams_) stream = Stream(context_->account);
  epochs_.clear();
  newest_ = -1;
  refit_ = {};
  rope_ = {};
  k_energy_ = v_energy_ = {};
  context_->account->ReturnFreedMemory();
}

Cells::Place Cells::Find(int64_t cell) const {
  const int64_t all = cells_ * streams();
  if (cell < 0 || cell >= all) {
    throw InputError(Where(shape()) + "cell " + std::to_string(cell) +
                     " does not exist; allowed are 0 to " + std::to_string(all - 1));
  }
  return {static_cast<int>(cell / cells_), cell % cells_};
}

Cells::Place Cells::FindRange(int64_t first, int64_t n) const {
  const Place place = Find(first);
  if (n < 0 || place.cell + n > cells_) {
    throw InputError(Where(shape()) + std::to_string(n) + " cells from " + std::to_string(first) +
                     " on are not in one stream; streams have " + std::to_string(cells_) +
                     " cells");
  }
  return place;
}

const uint8_t* Cells::Page(const Stream& stream, int epoch, int64_t frame) const {
  return stream.packed[static_cast<size_t>(epoch)].pages.data() +
         frame * codec(epoch).layout.page_bytes;
}

uint8_t* Cells::Page(Stream& stream, int epoch, int64_t frame) {
  return const_cast<uint8_t*>(Page(std::as_const(stream), epoch, frame));
}

void Cells::EnsureBlocks(Stream& stream, int64_t blocks) {
  const auto n = static_cast<size_t>(blocks);
  if (stream.blocks.size() >= n) return;
  stream.positions.resize(n);
  stream.blocks.resize(n);
}

void Cells::EnsureSlab(Stream& stream, int epoch, int64_t frame) {
  while (stream.packed.size() <= static_cast<size_t>(epoch)) {
    stream.packed.emplace_back(context_->account);
  }
  Packed& packed = stream.packed[static_cast<size_t>(epoch)];
  const auto slab = static_cast<size_t>(frame / slab_frames());
  if (packed.slabs.size() <= slab) packed.slabs.resize(slab + 1);
  if (packed.slabs[slab].bytes() > 0) return;
  if (!packed.pages.data()) {
    const int64_t frames = PagesFor(cells_, static_cast<int>(frame_cells()));
    packed.pages = Region(frames * codec(epoch).layout.page_bytes + kReadPadding);
  }
  packed.slabs[slab] = MemoryCharge(context_->account, static_cast<int64_t>(slab_bytes(epoch)));
}

void Cells::MakeExact(Stream& stream, int64_t block) {
  Block& b = stream.blocks[block];
  if (b.exact) return;
  auto exact =
      std::make_shared<Buffer>(context_->account, exact_layout().page_bytes + kReadPadding);
  stream.open.push_back(block);
  b.exact = std::move(exact);
}

void Cells::Drop(Stream& stream, int64_t frame) {
  const auto blocks = static_cast<int64_t>(stream.blocks.size());
  const int64_t first = frame * frame_blocks(), end = std::min(first + frame_blocks(), blocks);
  int epoch = -1;
  for (int64_t b = first; b < end; ++b) {
    epoch = std::max(epoch, stream.blocks[b].epoch);
    stream.blocks[b] = {};
    stream.positions[b] = {};
    std::erase(stream.open, b);
  }
  if (epoch < 0) return;
  const int64_t slab = frame / slab_frames(), per_slab = slab_frames() * frame_blocks();
  const auto begin = stream.blocks.begin() + slab * per_slab;
  const auto last = stream.blocks.begin() + std::min((slab + 1) * per_slab, blocks);
  if (std::none_of(begin, last, [&](const Block& b) { return b.epoch == epoch; })) {
    Packed& packed = stream.packed[static_cast<size_t>(epoch)];
    packed.slabs[slab] = MemoryCharge();
    packed.pages.Release(slab * slab_bytes(epoch), slab_bytes(epoch));
  }
  Epoch& old = epochs_[static_cast<size_t>(epoch)];
  if (--old.frames == 0 && epoch != newest_) old.codec.reset();
}

void Cells::DecodeFrame(const Stream& stream, int64_t frame, bool values,
                        uint8_t* const* exact) const {
  TokenView view;
  const int64_t first = frame * frame_blocks();
  FillView(
      stream, first, first + frame_blocks(), cells_, [](int64_t) { return false; }, view);
  std::vector<float> rows(static_cast<size_t>(frame_cells()) * dim(values));
  const PageLayout& layout = exact_layout();
  for (int h = 0; h < shape().kv_heads; ++h) {
    DecodeRows(view, view.segments[0], h, values, first * kBlockTokens,
               first * kBlockTokens + frame_cells(), rows.data());
    for (float& x : rows) x = std::clamp(x, -kMaxF16, kMaxF16);
    for (int64_t t = 0; t < frame_cells(); ++t) {
      WriteExactRow(values ? context_->window.v : context_->window.k, &rows[t * dim(values)],
                    dim(values), static_cast<int>(t % kBlockTokens),
                    exact[t / kBlockTokens] + (values ? layout.v_offset : layout.k_offset)[h]);
    }
  }
}

void Cells::Reopen(Stream& stream, int64_t frame) {
  const int64_t first = frame * frame_blocks();
  std::vector<BufferPtr> exact;
  std::vector<uint8_t*> pages;
  for (int64_t i = 0; i < frame_blocks(); ++i) {
    exact.push_back(
        std::make_shared<Buffer>(context_->account, exact_layout().page_bytes + kReadPadding));
    pages.push_back(exact.back()->data());
  }
  stream.open.reserve(stream.open.size() + exact.size());
  for (const bool values : {false, true}) DecodeFrame(stream, frame, values, pages.data());
  const auto of_frame = [&](auto& all) {
    return std::vector(all.begin() + first, all.begin() + first + frame_blocks());
  };
  std::vector<Block> kept = of_frame(stream.blocks);
  const std::vector<BlockPositions> positions = of_frame(stream.positions);
  Drop(stream, frame);
  for (int64_t i = 0; i < frame_blocks(); ++i) {
    kept[i].epoch = -1;
    kept[i].exact = std::move(exact[i]);
    stream.blocks[first + i] = std::move(kept[i]);
    stream.positions[first + i] = positions[i];
    stream.open.push_back(first + i);
  }
}

void Cells::Open(const CellRows& rows) {
  int64_t last = -1;  // block that is open, counted over all streams
  for (int64_t i = 0; i < rows.n; ++i) {
    const Place place = Find(rows.cells[i]);
    const int64_t block = place.cell / kBlockTokens;
    if (last == place.stream * cells_ + block) continue;
    last = place.stream * cells_ + block;
    Stream& stream = streams_[place.stream];
    EnsureBlocks(stream, block + 1);
    if (stream.blocks[block].encoded()) Reopen(stream, block / frame_blocks());
    MakeExact(stream, block);
  }
}

void Cells::SetPosition(Stream& stream, int64_t cell, int32_t position) {
  Block& block = stream.blocks[cell / kBlockTokens];
  BlockPositions& known = stream.positions[cell / kBlockTokens];
  const auto t = static_cast<int>(cell % kBlockTokens);
  if (!known.list) {
    const bool follows = position >= t;
    if (block.keys == 0 && follows) known.first = position - t;
    if (follows && known.first == position - t) return;
    block.list = std::make_shared<Buffer>(context_->account, sizeof(int32_t) * kBlockTokens);
    auto* const list = reinterpret_cast<int32_t*>(block.list->data());
    std::iota(list, list + kBlockTokens, static_cast<int32_t>(known.first));
    known.list = list;
  }
  reinterpret_cast<int32_t*>(block.list->data())[t] = position;
}

void Cells::Put(bool values, const CellRows& rows) {
  const int64_t stride = rows.stride > 0 ? rows.stride : width(values);
  if (rows.n < 1 || !rows.cells || !rows.rows || stride < width(values)) {
    throw InputError(Where(shape()) + "rows for " + std::to_string(rows.n) + " cells of " +
                     std::to_string(stride) + " floats; allowed are 1 or more of at least " +
                     std::to_string(width(values)));
  }
  CheckDistinct(shape(), rows);
  for (int64_t i = 0; i < rows.n; ++i) {
    Find(rows.cells[i]);
    if (!values && rows.positions && rows.positions[i] < 0) {
      throw InputError(Where(shape()) + "position " + std::to_string(rows.positions[i]) +
                       " is not allowed; it must be at least 0");
    }
  }
  if (!values && rows.rope) CheckRope(shape(), *rows.rope);
  if (!values && !fitted() && context_->calibration && rows.rope &&
      !context_->calibration->Fits(*rows.rope)) {
    throw StateError(Where(shape()) +
                     "rope differs from that of the cells before; a cache with basis=FILE has one "
                     "rotation");
  }
  ConstTensor tensor{rows.rows, DType::kF32, {1, shape().kv_heads, rows.n, dim(values)}, {}};
  tensor.stride = {0, dim(values), stride, 1};
  CheckValues(*context_, tensor, 0, values ? "V" : "K");
  if (!values) Seal();
  MakingRoom([&] { Open(rows); });
  Write(values, rows);
  if (!values && !fitted()) rope_ = rows.rope ? *rows.rope : RopeParams();
}

void Cells::Write(bool values, const CellRows& rows) {
  // First, as what follows may find no memory for a position, and would leave cells that are there
  // but hold nothing.
  ParallelFor(context_->threads, PagesFor(rows.n, kRowsAtOnce), [&](int64_t part) {
    WriteRows(values, rows, part * kRowsAtOnce, std::min(rows.n, (part + 1) * kRowsAtOnce));
  });
  for (int64_t i = 0; i < rows.n; ++i) {
    const Place place = Find(rows.cells[i]);
    Stream& stream = streams_[place.stream];
    Block& block = stream.blocks[place.cell / kBlockTokens];
    if (!values) {
      MakingRoom([&] {
        SetPosition(stream, place.cell,
                    rows.positions ? rows.positions[i] : static_cast<int32_t>(place.cell));
      });
      block.written = ++stream.clock;
    }
    (values ? block.values : block.keys) |= 1u << place.cell % kBlockTokens;
  }
}

void Cells::WriteRows(bool values, const CellRows& rows, int64_t begin, int64_t end) {
  const int64_t stride = rows.stride > 0 ? rows.stride : width(values);
  const PagePlan& plan = values ? context_->window.v : context_->window.k;
  const std::vector<size_t>& offset = values ? exact_layout().v_offset : exact_layout().k_offset;
  for (int64_t i = begin; i < end; ++i) {
    const Place place = Find(rows.cells[i]);
    uint8_t* const page = streams_[place.stream].blocks[place.cell / kBlockTokens].exact->data();
    for (int h = 0; h < shape().kv_heads; ++h) {
      WriteExactRow(plan, rows.rows + i * stride + int64_t{h} * dim(values), dim(values),
                    static_cast<int>(place.cell % kBlockTokens), page + offset[h]);
    }
  }
}

namespace {

// Its place among the codecs of the view, where it is put if it is not there.
int CodecIndex(const LayerCodec& codec, TokenView& view) {
  for (size_t i = 0; i < view.codecs.size(); ++i) {
    if (view.codecs[i] == &codec) return static_cast<int>(i);
  }
  view.codecs.push_back(&codec);
  return static_cast<int>(view.codecs.size()) - 1;
}

}  // namespace

template <typename F>
void Cells::FillView(const Stream& stream, int64_t begin, int64_t end, int64_t cells,
                     const F& hidden, TokenView& view) const {
  view.context = context_.get();
  view.codecs.clear();
  view.size = cells;
  view.window = 0;
  view.segments.clear();
  view.pages.clear();
  const auto blocks = static_cast<int64_t>(stream.blocks.size());
  for (int64_t b = begin; b < end;) {
    const bool there = b < blocks && (stream.blocks[b].exact || stream.blocks[b].encoded());
    const int epoch = there ? stream.blocks[b].epoch : -1;
    const int64_t step = epoch >= 0 ? frame_blocks() : 1;
    bool seen = false;
    for (int64_t i = 0; i < step && b + i < end; ++i) seen |= !hidden(b + i);
    if (seen && !there) {
      throw StateError(Where(shape()) + "cells " + std::to_string(b * kBlockTokens) + " to " +
                       std::to_string((b + 1) * kBlockTokens - 1) +
                       " are visible, but none of them was ever written");
    }
    if (seen) {
      const int64_t first = b * kBlockTokens;
      const int64_t count = std::min(step * kBlockTokens, cells - first);
      const int codec_index = epoch >= 0 ? CodecIndex(codec(epoch), view) : -1;
      Segment* last = view.segments.empty() ? nullptr : &view.segments.back();
      if (last && last->codec == codec_index && last->first + last->count == first) {
        last->count += count;
      } else {
        view.segments.push_back({.layout = epoch >= 0 ? &codec(epoch).layout : &exact_layout(),
                                 .codec = codec_index,
                                 .first = first,
                                 .count = count,
                                 .page = view.pages.size(),
                                 .positions = &stream.positions[b]});
      }
      view.pages.push_back(epoch >= 0 ? Page(stream, epoch, b / step)
                                      : stream.blocks[b].exact->data());
    }
    b += step;
  }
}

void Cells::Attend(const CellAttendArgs& args, const MutableTensor& out) const {
  CheckQueries(shape(), 1, args.q, out);
  const Place place = FindRange(args.first, args.cells);
  if (place.cell != 0 || args.cells < 1 || (args.mask && args.mask_stride < args.cells)) {
    throw InputError(Where(shape()) + std::to_string(args.cells) + " cells from " +
                     std::to_string(args.first) + " on, in a mask of " +
                     std::to_string(args.mask_stride) +
                     " columns; allowed are the first cells of a stream and as many columns");
  }
  const HalfMask mask{args.mask, args.mask_stride};
  const int64_t n = args.q.shape[2];
  const auto hidden = [&](int64_t block) {
    const int64_t first = block * kBlockTokens;
    return mask.Hides(0, n, first, std::min<int64_t>(kBlockTokens, args.cells - first));
  };
  thread_local TokenView view;  // keeps its memory from call to call
  FillView(streams_[place.stream], 0, PagesFor(args.cells, kBlockTokens), args.cells, hidden, view);
  AttendArgs attend;
  attend.q = args.q;
  attend.scale = args.scale;
  attend.soft_cap = args.soft_cap;
  attend.sinks = args.sinks;
  attend.causal = false;
  palu::Attend(AttendCall(view, attend, 0, out, mask));
}

void Cells::Read(bool values, int64_t first, int64_t n, float* out) const {
  const Place place = FindRange(first, n);
  const Stream& stream = streams_[place.stream];
  std::fill_n(out, n * width(values), 0.0f);
  const int64_t end =
      std::min(place.cell + n, static_cast<int64_t>(stream.blocks.size()) * kBlockTokens);
  if (place.cell >= end) return;
  const int64_t first_block = place.cell / kBlockTokens;
  ParallelFor(context_->threads, PagesFor(end, kBlockTokens) - first_block, [&](int64_t i) {
    const int64_t cell = std::max(place.cell, (first_block + i) * kBlockTokens);
    ReadBlock(values, stream, cell, std::min(end, (first_block + i + 1) * kBlockTokens),
              out + (cell - place.cell) * width(values));
  });
}

void Cells::ReadBlock(bool values, const Stream& stream, int64_t cell, int64_t end,
                      float* out) const {
  const int64_t block = cell / kBlockTokens, frame = block / frame_blocks() * frame_blocks();
  const bool encoded = stream.blocks[block].encoded();
  TokenView view;
  FillView(
      stream, encoded ? frame : block, encoded ? frame + frame_blocks() : block + 1, cells_,
      [&](int64_t b) { return !stream.blocks[b].exact && !stream.blocks[b].encoded(); }, view);
  if (view.segments.empty()) return;
  const uint32_t set = values ? stream.blocks[block].values : stream.blocks[block].keys;
  std::vector<float> rows(static_cast<size_t>(kBlockTokens) * dim(values));
  for (int h = 0; h < shape().kv_heads; ++h) {
    DecodeRows(view, view.segments[0], h, values, cell, end, rows.data());
    for (int64_t c = cell; c < end; ++c) {
      if ((set >> (c % kBlockTokens) & 1) == 0) continue;
      std::copy_n(&rows[(c - cell) * dim(values)], dim(values),
                  out + (c - cell) * width(values) + int64_t{h} * dim(values));
    }
  }
}

}  // namespace palu
