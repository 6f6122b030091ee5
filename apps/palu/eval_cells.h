// File: eval_cells.h - what an evaluation has measured so far, and the file that keeps it.
//
// A cell is one cache on one chunk. Cells outlive the run in a part file, so that the same command
// again, with more caches or more chunks, computes only what is missing.
#ifndef PALU_APPS_EVAL_CELLS_H_
#define PALU_APPS_EVAL_CELLS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "eval_size.h"

namespace palu::app {

struct Cell {
  // One entry per scored position.
  std::vector<float> kl, nll;
  std::vector<uint8_t> same_top;  // 0 or 1
  CacheSize size;                 // at the end of the chunk
  // Of the first half, and of the scored half; without the scoring itself.
  int64_t prompt_tokens = 0, scored_tokens = 0;
  double prompt_seconds = 0, scored_seconds = 0;
};

// The reference has cells too, of its nll alone.
inline constexpr char kReferenceCell[] = "reference";

// Cells by (resolved cache text, chunk).
using CellMap = std::map<std::pair<std::string, int64_t>, Cell>;

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_CELLS_H_
