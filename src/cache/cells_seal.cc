// How cells are packed: which rows the codec is fitted on, which blocks are due.
#include <algorithm>
#include <bit>
#include <numeric>

#include "base/threads.h"
#include "cache/cells.h"

namespace palu {
namespace {

constexpr uint32_t kAll = ~0u;

}  // namespace

bool Cells::IsSink(const Stream& stream, int64_t cell) const {
  return stream.positions[cell / kBlockTokens].at(static_cast<int>(cell % kBlockTokens)) <
         context_->config.sink_tokens;
}

bool Cells::HasSink(const Stream& stream, int64_t block) const {
  for (int t = 0; t < kBlockTokens; ++t) {
    if (IsSink(stream, block * kBlockTokens + t)) return true;
  }
  return false;
}

void Cells::Normalise(Stream& stream, int64_t block) {
  BlockPositions& known = stream.positions[block];
  if (!known.list) return;
  for (int t = 1; t < kBlockTokens; ++t) {
    if (known.list[t] != known.list[0] + t) return;
  }
  known = {known.list[0]};
  stream.blocks[block].list.reset();
}

std::vector<Cells::Place> Cells::RowsToFit() const {
  std::vector<Place> rows;
  const int64_t most =
      context_->fit_tokens == 0
          ? cells_ * streams()
          : std::max<int64_t>(2, context_->fit_due() - context_->config.sink_tokens);
  for (int s = 0; s < streams(); ++s) {
    const Stream& stream = streams_[s];
    std::vector<int64_t> open(stream.open.begin(), stream.open.end());
    std::sort(open.begin(), open.end());
    for (const int64_t b : open) {
      const uint32_t set = stream.blocks[b].keys & stream.blocks[b].values;
      for (int t = 0; t < kBlockTokens && static_cast<int64_t>(rows.size()) < most; ++t) {
        const int64_t cell = b * kBlockTokens + t;
        if ((set >> t & 1) && !IsSink(stream, cell)) rows.push_back({s, cell});
      }
    }
  }
  return rows;
}

void Cells::Fit() {
  const int64_t due = std::max<int64_t>(2, context_->fit_due() - context_->config.sink_tokens);
  int64_t there = 0;
  for (const Stream& stream : streams_) {
    for (const int64_t b : stream.open) {
      there += std::popcount(stream.blocks[b].keys & stream.blocks[b].values);
    }
  }
  if (there < due) return;
  const std::vector<Place> places = RowsToFit();
  if (static_cast<int64_t>(places.size()) < due) return;
  FitRows rows;
  if (context_->method->fits()) {
    for (const Place& p : places) {
      rows.positions.push_back(streams_[p.stream].positions[p.cell / kBlockTokens].at(
          static_cast<int>(p.cell % kBlockTokens)));
    }
  }
  rows.read = [&](int head, bool is_v, int64_t first, int64_t n, float* out) {
    TokenView view;
    for (int64_t i = first; i < first + n;) {
      const Place& p = places[i];
      const int64_t block = p.cell / kBlockTokens;
      int64_t run = 1;
      while (i + run < first + n && places[i + run].stream == p.stream &&
             places[i + run].cell == p.cell + run && (p.cell + run) / kBlockTokens == block) {
        ++run;
      }
      view.context = context_.get();
      view.pages = {streams_[p.stream].blocks[block].exact->data()};
      const Segment segment{
          .layout = &exact_layout(), .first = block * kBlockTokens, .count = kBlockTokens};
      DecodeRows(view, segment, head, is_v, p.cell, p.cell + run, out + (i - first) * dim(is_v));
      i += run;
    }
  };
  codec_ = FitCodec(*context_, rope_, rows);
}

bool Cells::Due(const Stream& stream, int64_t frame) const {
  const int64_t first = frame * frame_blocks();
  if (first + frame_blocks() > static_cast<int64_t>(stream.blocks.size())) return false;
  for (int64_t b = first; b < first + frame_blocks(); ++b) {
    const Block& block = stream.blocks[b];
    if (!block.exact || block.keys != kAll || block.values != kAll) return false;
    if (stream.clock - block.written < context_->config.recent_tokens) return false;
    if (HasSink(stream, b)) return false;
  }
  return true;
}

void Cells::Encode(Stream& stream, const std::vector<int64_t>& frames) {
  const int64_t sides = 2 * static_cast<int64_t>(codec_->units.size());
  const auto n = static_cast<int64_t>(frames.size());
  std::vector<const uint8_t*> exact;
  for (const int64_t f : frames) {
    EnsureSlab(stream, f);
    for (int64_t b = f * frame_blocks(); b < (f + 1) * frame_blocks(); ++b) {
      Normalise(stream, b);
      exact.push_back(stream.blocks[b].exact->data());
    }
  }
  std::vector<Energy> energies(static_cast<size_t>(n * sides));
  ParallelFor(context_->threads, n * sides, [&](int64_t task) {
    const int64_t i = task / sides;
    energies[task] =
        EncodeSide(*context_, *codec_, &exact[i * frame_blocks()],
                   &stream.positions[frames[i] * frame_blocks()],
                   static_cast<int>(task % sides / 2), task % 2, Page(stream, frames[i]));
  });
  for (int64_t i = 0; i < n * sides; ++i) {
    Energy& sum = i % 2 ? v_energy_ : k_energy_;
    sum.all += energies[i].all;
    sum.kept += std::min(energies[i].kept, energies[i].all);
  }
  for (const int64_t f : frames) {
    for (int64_t b = f * frame_blocks(); b < (f + 1) * frame_blocks(); ++b) {
      stream.blocks[b].exact.reset();
      stream.blocks[b].encoded = true;
      std::erase(stream.open, b);
    }
  }
}

// A slab at a time, so that exact blocks go as packed ones come.
void Cells::Seal() {
  if (!context_->method->encodes()) return;
  if (!codec_) Fit();
  if (!codec_) return;
  for (Stream& stream : streams_) {
    std::vector<int64_t> frames;
    for (const int64_t b : stream.open) frames.push_back(b / frame_blocks());
    std::sort(frames.begin(), frames.end());
    frames.erase(std::unique(frames.begin(), frames.end()), frames.end());
    std::erase_if(frames, [&](int64_t f) { return !Due(stream, f); });
    for (size_t i = 0; i < frames.size();) {
      size_t end = i + 1;
      while (end < frames.size() && frames[end] / slab_frames() == frames[i] / slab_frames()) ++end;
      Encode(stream, {frames.begin() + i, frames.begin() + end});
      i = end;
    }
  }
}

CacheStats Cells::Stats() const {
  CacheStats stats;
  int64_t packed_frames = 0, slabs = 0;
  for (const Stream& stream : streams_) {
    stats.table_bytes += static_cast<int64_t>(stream.blocks.capacity() * sizeof(Block) +
                                              stream.positions.capacity() * sizeof(BlockPositions) +
                                              stream.open.capacity() * sizeof(int64_t) +
                                              stream.slabs.capacity() * sizeof(MemoryCharge));
    for (const Block& block : stream.blocks) {
      const int tokens = std::popcount(block.keys & block.values);
      stats.tokens += tokens;
      (block.encoded ? stats.encoded_tokens : stats.exact_tokens) += tokens;
      packed_frames += block.encoded;
      if (block.exact) stats.window_bytes += static_cast<int64_t>(block.exact->size());
      if (block.list) stats.table_bytes += static_cast<int64_t>(block.list->size());
    }
    for (const MemoryCharge& slab : stream.slabs) slabs += slab.bytes();
  }
  packed_frames /= frame_blocks();
  if (codec_) {
    for (const SideCodec* side : {&codec_->k, &codec_->v}) {
      for (const GroupCodec& group : side->groups) {
        const int64_t sides = group.units * packed_frames;
        stats.code_bytes += sides * static_cast<int64_t>(group.plan.code_bytes());
        stats.scale_bytes += sides * static_cast<int64_t>(group.plan.scale_bytes);
      }
    }
    stats.basis_bytes = codec_->basis_bytes();
    stats.rank_k = codec_->k.basis_rank();
    stats.rank_v = codec_->v.basis_rank();
    stats.assigned_avg_bits = std::max(codec_->k.CodeBits(), codec_->v.CodeBits());
    stats.code_bits = (codec_->k.StoredBits() + codec_->v.StoredBits()) / 2;
  }
  if (!context_->method->encodes()) {
    stats.assigned_avg_bits = stats.code_bits =
        context_->method->window_codec() == Codec::kF32 ? 32 : 16;
  }
  stats.slack_bytes = slabs - stats.code_bytes - stats.scale_bytes;
  stats.nbytes = slabs + stats.window_bytes + stats.table_bytes + stats.basis_bytes;
  const int64_t elements = stats.tokens * (width(false) + width(true));
  stats.fp16_bytes = 2 * elements;
  stats.stored_bits_per_element =
      elements > 0 ? static_cast<double>(stats.nbytes) * 8 / static_cast<double>(elements) : 0;
  const auto lost = [](const Energy& e) { return e.all > 0 ? 1.0 - e.kept / e.all : 0.0; };
  stats.residual_energy_k = lost(k_energy_);
  stats.residual_energy_v = lost(v_energy_);
  return stats;
}

}  // namespace palu
