// How cells are packed: which blocks are due, and what they take.
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
  Epoch& epoch = epochs_[static_cast<size_t>(newest_)];
  const LayerCodec& codec = *epoch.codec;
  const int64_t sides = 2 * static_cast<int64_t>(codec.units.size());
  const auto n = static_cast<int64_t>(frames.size());
  std::vector<const uint8_t*> exact;
  for (const int64_t f : frames) {
    EnsureSlab(stream, newest_, f);
    for (int64_t b = f * frame_blocks(); b < (f + 1) * frame_blocks(); ++b) {
      Normalise(stream, b);
      exact.push_back(stream.blocks[b].exact->data());
    }
  }
  std::vector<Energy> energies(static_cast<size_t>(n * sides));
  ParallelFor(context_->threads, n * sides, [&](int64_t task) {
    const int64_t i = task / sides;
    energies[task] = EncodeSide(
        *context_, codec, &exact[i * frame_blocks()], &stream.positions[frames[i] * frame_blocks()],
        static_cast<int>(task % sides / 2), task % 2, Page(stream, newest_, frames[i]));
  });
  double lost[2] = {};
  for (int64_t i = 0; i < n * sides; ++i) {
    Energy& sum = i % 2 ? v_energy_ : k_energy_;
    sum.all += energies[i].all;
    sum.kept += std::min(energies[i].kept, energies[i].all);
    lost[i % 2] += energies[i].lost;
  }
  epoch.frames += n;
  const int packed_by = newest_;
  Watch(stream, frames, lost);  // may begin an epoch, for the next
  for (const int64_t f : frames) {
    for (int64_t b = f * frame_blocks(); b < (f + 1) * frame_blocks(); ++b) {
      stream.blocks[b].exact.reset();
      stream.blocks[b].epoch = packed_by;
      std::erase(stream.open, b);
    }
  }
}

std::vector<int64_t> Cells::DueFrames(const Stream& stream) const {
  std::vector<int64_t> frames;
  for (const int64_t b : stream.open) frames.push_back(b / frame_blocks());
  std::sort(frames.begin(), frames.end());
  frames.erase(std::unique(frames.begin(), frames.end()), frames.end());
  std::erase_if(frames, [&](int64_t f) { return !Due(stream, f); });
  return frames;
}

// A slab at a time, so that exact blocks go as packed ones come.
void Cells::Seal() {
  if (!context_->method->encodes()) return;
  if (!fitted()) Fit();
  if (!fitted()) return;
  for (Stream& stream : streams_) {
    const std::vector<int64_t> frames = DueFrames(stream);
    for (size_t i = 0; i < frames.size();) {
      size_t end = i + 1;
      while (end < frames.size() && frames[end] / slab_frames() == frames[i] / slab_frames()) ++end;
      MakingRoom([&] { Encode(stream, {frames.begin() + i, frames.begin() + end}); });
      i = end;
    }
  }
  context_->account->ReturnFreedMemory();
}

CacheStats Cells::Stats() const {
  CacheStats stats;
  int64_t slabs = 0;
  for (const Stream& stream : streams_) {
    stats.table_bytes += static_cast<int64_t>(stream.blocks.capacity() * sizeof(Block) +
                                              stream.positions.capacity() * sizeof(BlockPositions) +
                                              stream.open.capacity() * sizeof(int64_t));
    for (const Packed& packed : stream.packed) {
      stats.table_bytes += static_cast<int64_t>(packed.slabs.capacity() * sizeof(MemoryCharge));
    }
    for (const Block& block : stream.blocks) {
      const int tokens = std::popcount(block.keys & block.values);
      stats.tokens += tokens;
      (block.encoded() ? stats.encoded_tokens : stats.exact_tokens) += tokens;
      if (block.exact) stats.window_bytes += static_cast<int64_t>(block.exact->size());
      if (block.list) stats.table_bytes += static_cast<int64_t>(block.list->size());
    }
    for (const Packed& packed : stream.packed) {
      for (const MemoryCharge& slab : packed.slabs) slabs += slab.bytes();
    }
  }
  for (const Epoch& epoch : epochs_) {
    if (!epoch.codec) continue;
    stats.epochs += epoch.frames > 0;
    for (const SideCodec* side : {&epoch.codec->k, &epoch.codec->v}) {
      for (const GroupCodec& group : side->groups) {
        const int64_t sides = group.units * epoch.frames;
        stats.code_bytes += sides * static_cast<int64_t>(group.plan.code_bytes());
        stats.scale_bytes += sides * static_cast<int64_t>(group.plan.scale_bytes);
      }
    }
    if (!context_->calibration) stats.basis_bytes += epoch.codec->basis_bytes();
  }
  if (context_->calibration) stats.basis_bytes = context_->calibration->nbytes();
  if (refit_.sample) stats.table_bytes += refit_.sample->nbytes();
  if (refit_.candidate) stats.basis_bytes += refit_.candidate->basis_bytes();
  if (fitted()) {
    const LayerCodec& newest = codec(newest_);
    stats.rank_k = newest.k.basis_rank();
    stats.rank_v = newest.v.basis_rank();
    stats.assigned_avg_bits = std::max(newest.k.CodeBits(), newest.v.CodeBits());
    stats.code_bits = (newest.k.StoredBits() + newest.v.StoredBits()) / 2;
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
