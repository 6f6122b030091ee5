// File: page_layout.h - where K and V of every head, or unit of heads, sit within one page.
#ifndef PALU_SRC_CODEC_PAGE_LAYOUT_H_
#define PALU_SRC_CODEC_PAGE_LAYOUT_H_

#include <cstddef>
#include <vector>

#include "codec/page_plan.h"

namespace palu {

// A page of all heads: K of head 0, V of head 0, K of head 1, ... each at a multiple of 4 bytes.
// Where heads are joined their unit takes the place of a head.
struct PageLayout {
  int page_tokens = kBlockTokens;
  std::vector<const PagePlan*> k, v;       // [units]; owned elsewhere, same page_tokens
  std::vector<size_t> k_offset, v_offset;  // [units], bytes
  size_t page_bytes = 0;

  static PageLayout Make(std::vector<const PagePlan*> k_plans,
                         std::vector<const PagePlan*> v_plans) {
    PageLayout layout;
    layout.k = std::move(k_plans);
    layout.v = std::move(v_plans);
    layout.page_tokens = layout.k[0]->page_tokens;
    auto place = [&layout](const PagePlan& plan) {
      const size_t at = layout.page_bytes;
      layout.page_bytes += (plan.page_bytes() + 3) / 4 * 4;
      return at;
    };
    for (size_t h = 0; h < layout.k.size(); ++h) {
      layout.k_offset.push_back(place(*layout.k[h]));
      layout.v_offset.push_back(place(*layout.v[h]));
    }
    return layout;
  }
};

}  // namespace palu

#endif  // PALU_SRC_CODEC_PAGE_LAYOUT_H_
