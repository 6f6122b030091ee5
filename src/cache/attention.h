// File: attention.h - attention over segments: sinks, packed pages and window alike.
#ifndef PALU_SRC_CACHE_ATTENTION_H_
#define PALU_SRC_CACHE_ATTENTION_H_

#include "cache/sequence.h"
#include "palu/cache.h"

namespace palu {

// One sequence's share of KVCache::Attend: args.q and out at batch element b.
//   score_t = scale * (B q . L_t + q . mu)          encoded tokens
//   out     = (sum_t p_t L_t) B + mu sum_t p_t      plus the exact tokens' own terms
// Few rows (decode) go straight over packed pages, split over (head, run of tokens) and merged by
// log-sum-exp in a fixed order; many rows (prefill) take tiles of 256 tokens that are decoded once
// per block of queries. The arguments have been checked.
void AttendSequence(const Sequence& sequence, const AttendArgs& args, int64_t b,
                    const MutableTensor& out);

}  // namespace palu

#endif  // PALU_SRC_CACHE_ATTENTION_H_
