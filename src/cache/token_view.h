// File: token_view.h - tokens as attention walks them: runs of pages anywhere in memory.
#ifndef PALU_SRC_CACHE_TOKEN_VIEW_H_
#define PALU_SRC_CACHE_TOKEN_VIEW_H_

#include <cstdint>
#include <vector>

#include "cache/layer_context.h"
#include "codec/page_layout.h"
#include "methods/layer_codec.h"

namespace palu {

// Positions of the tokens of one block of 32.
struct BlockPositions {
  int64_t first = 0;              // of the first token; the others follow it
  const int32_t* list = nullptr;  // unless this tells them one by one, [32]

  int64_t at(int t) const { return list ? list[t] : first + t; }
};

// A run of tokens with one layout, from the start of a page on.
struct Segment {
  const PageLayout* layout = nullptr;
  int codec = -1;                             // that packed them, of TokenView::codecs; -1: exact
  int64_t first = 0;                          // index of its first token
  int64_t count = 0;                          // tokens; the last page may be partly filled
  size_t page = 0;                            // its first one among TokenView::pages
  int64_t position = 0;                       // of its first token; the others follow it
  const BlockPositions* positions = nullptr;  // unless this tells them block by block

  bool encoded() const { return codec >= 0; }
  BlockPositions block(int64_t i) const {
    return positions ? positions[i] : BlockPositions{position + i * kBlockTokens};
  }
};

// The tokens of one attention call. Indices count the tokens of a sequence, or the cells of a
// stream; those that no segment covers are not there.
struct TokenView {
  const LayerContext* context = nullptr;
  // Of the encoded segments, each once; all divide the heads into the same units.
  std::vector<const LayerCodec*> codecs;
  int64_t size = 0;               // indices are below
  int64_t window = 0;             // of a causal call: a query sees no token further back; 0 = all
  std::vector<Segment> segments;  // by index
  std::vector<const uint8_t*> pages;

  // Of one side of one unit, in an encoded segment.
  const GroupCodec& group(const Segment& segment, bool is_v, int unit) const {
    const LayerCodec& codec = *codecs[static_cast<size_t>(segment.codec)];
    return (is_v ? codec.v : codec.k).unit(unit);
  }
};

}  // namespace palu

#endif  // PALU_SRC_CACHE_TOKEN_VIEW_H_
