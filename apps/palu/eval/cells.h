// File: cells.h - what an evaluation has measured so far, and the file that keeps it.
//
// A cell is one cache on one chunk. Cells outlive the run in a part file, so that the same command
// again, with more caches or more chunks, computes only what is missing.
#ifndef PALU_APPS_EVAL_CELLS_H_
#define PALU_APPS_EVAL_CELLS_H_

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "eval/size.h"

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

// What cells depend on beside cache and chunk.
struct EvalKey {
  std::string model;  // file name, for messages
  std::string model_sha256, text_sha256;
  int64_t ctx = 0, batch = 0;
  std::string mode;     // "batch", "decode"
  std::string weights;  // "file", "f32"
  std::string version;  // of the program
};

// Cells, and small results of other checks, with their file.
class CellStore {
 public:
  // Reads the part file where there is one. path: "" keeps nothing. Errors: FormatError (damaged,
  // or of another model, text or setting: the message names the difference and the way out).
  CellStore(std::string path, EvalKey key);

  CellMap cells;
  std::map<std::string, nlohmann::ordered_json> notes;  // by a name that says all it depends on

  // Replaces the file at once, so that it is whole whenever the program ends. Errors: FormatError.
  void Save() const;
  const EvalKey& key() const { return key_; }

 private:
  void Load(const std::string& bytes);

  std::string path_;
  EvalKey key_;
};

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_CELLS_H_
