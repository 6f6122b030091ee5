// What cells are packed by: the first fit, and the trials of others. docs/decisions/0008-epochs.md
// has the figures.
#include <algorithm>
#include <bit>
#include <exception>

#include "base/threads.h"
#include "cache/cells.h"

namespace palu {
namespace {

constexpr size_t kMostEpochs = 4;
// Tokens that are packed before the first sample; after a trial that changed nothing twice as many.
constexpr int64_t kFirstInterval = 2048;
constexpr int64_t kSampleTokens = 2048;  // at least
constexpr int64_t kTrialTokens = 256;
// An epoch begins where the old codec loses so many times what the new one does on one side, and
// not clearly less on the other.
constexpr double kClearlyMore = 1.2;

}  // namespace

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
  Begin(FitCodec(*context_, rope_, RowsAt(places)));
}

FitRows Cells::RowsAt(std::vector<Place> places) const {
  FitRows rows;
  for (const Place& p : places) {
    rows.positions.push_back(streams_[p.stream].positions[p.cell / kBlockTokens].at(
        static_cast<int>(p.cell % kBlockTokens)));
  }
  rows.read = [this, places = std::move(places)](int head, bool is_v, int64_t first, int64_t n,
                                                 float* out) {
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
  return rows;
}

void Cells::Watch(const Stream& stream, const std::vector<int64_t>& frames, const double lost[2]) {
  // fit_tokens=0: the first tokens decide, however few.
  if (!context_->method->fits() || context_->calibration || context_->fit_tokens == 0) return;
  try {
    if (refit_.candidate) return Try(stream, frames, lost);
    if (refit_.sample) return Sample(stream, frames);
    refit_.packed += static_cast<int64_t>(frames.size()) * frame_cells();
    if (refit_.packed < refit_.interval || FreeEpoch() < 0) return;
    refit_.sample = std::make_unique<FitSample>(*context_, rope_, context_->account);
  } catch (const std::exception&) {
    // No memory for it, or nothing that the options allow: the epoch goes on, and so does packing.
    EndTrial();
  }
}

void Cells::EndTrial() {
  const int64_t interval = 2 * refit_.interval;
  refit_ = {};
  refit_.interval = interval;
}

void Cells::Sample(const Stream& stream, const std::vector<int64_t>& frames) {
  std::vector<Place> places;
  for (const int64_t f : frames) {
    for (int64_t c = f * frame_cells(); c < (f + 1) * frame_cells(); ++c) {
      places.push_back({static_cast<int>(&stream - streams_.data()), c});
    }
  }
  refit_.sample->Add(RowsAt(std::move(places)));
  if (refit_.sample->rows() < std::max(kSampleTokens, context_->fit_due())) return;
  refit_.candidate = refit_.sample->Fit();
  refit_.sample.reset();
}

void Cells::Try(const Stream& stream, const std::vector<int64_t>& frames, const double lost[2]) {
  const LayerCodec& codec = *refit_.candidate;
  const auto sides = 2 * static_cast<int64_t>(codec.units.size());
  const auto n = static_cast<int64_t>(frames.size());
  std::vector<double> by_candidate(static_cast<size_t>(n * sides));
  ParallelFor(context_->threads, n * sides, [&](int64_t task) {
    const int64_t first = frames[task / sides] * frame_blocks();
    std::vector<const uint8_t*> exact;
    for (int64_t b = first; b < first + frame_blocks(); ++b) {
      exact.push_back(stream.blocks[b].exact->data());
    }
    std::vector<uint8_t> page(codec.layout.page_bytes + kReadPadding);
    by_candidate[task] = EncodeSide(*context_, codec, exact.data(), &stream.positions[first],
                                    static_cast<int>(task % sides / 2), task % 2, page.data())
                             .lost;
  });
  for (int64_t i = 0; i < n * sides; ++i) refit_.lost[i % 2][0] += by_candidate[i];
  for (int side = 0; side < 2; ++side) refit_.lost[side][1] += lost[side];
  refit_.tried += n * frame_cells();
  if (refit_.tried < kTrialTokens) return;
  const auto clearly_more = [&](int side, int by, int than) {
    return refit_.lost[side][by] > kClearlyMore * refit_.lost[side][than];
  };
  bool better = false, worse = false;
  for (int side = 0; side < 2; ++side) {
    better |= clearly_more(side, 1, 0);
    worse |= clearly_more(side, 0, 1);
  }
  if (FreeEpoch() >= 0 && better && !worse) return Begin(std::move(refit_.candidate));
  EndTrial();
}

void Cells::Begin(std::shared_ptr<const LayerCodec> codec) {
  const int place = FreeEpoch();
  if (place == static_cast<int>(epochs_.size())) epochs_.emplace_back();
  for (Stream& stream : streams_) {
    // Its pages may be of another size than those of the epoch that was here.
    if (static_cast<size_t>(place) < stream.packed.size()) {
      stream.packed[static_cast<size_t>(place)] = Packed(context_->account);
    }
  }
  epochs_[static_cast<size_t>(place)] = {std::move(codec), 0};
  newest_ = place;
  refit_ = {};
  // Layers take turns: no step pays for all their fits.
  refit_.interval = kFirstInterval + shape().index % 32 * kBlockTokens;
}

int Cells::FreeEpoch() const {
  for (size_t i = 0; i < epochs_.size(); ++i) {
    if (epochs_[i].frames == 0) return static_cast<int>(i);
  }
  return epochs_.size() < kMostEpochs ? static_cast<int>(epochs_.size()) : -1;
}

}  // namespace palu
