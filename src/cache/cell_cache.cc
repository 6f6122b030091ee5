#include "palu/cell_cache.h"

#include <utility>

#include "base/threads.h"
#include "cache/cells.h"

namespace palu {

CellCache::CellCache(std::unique_ptr<Cells> cells) : cells_(std::move(cells)) {}
CellCache::CellCache(CellCache&&) noexcept = default;
CellCache& CellCache::operator=(CellCache&&) noexcept = default;
CellCache::~CellCache() = default;

void CellCache::PutKeys(const CellRows& rows) { cells_->Put(false, rows); }
void CellCache::PutValues(const CellRows& rows) { cells_->Put(true, rows); }
void CellCache::Seal() { cells_->Seal(); }
void CellCache::Attend(const CellAttendArgs& args, const MutableTensor& out) const {
  cells_->Attend(args, out);
}
void CellCache::Read(bool values, int64_t first, int64_t n, float* out) const {
  cells_->Read(values, first, n, out);
}
void CellCache::Copy(bool values, int64_t from, int64_t to, int64_t n) {
  cells_->Copy(values, from, to, n);
}
void CellCache::Turn(const RopeParams& rope, const int32_t* shifts, int64_t first, int64_t n) {
  cells_->Turn(rope, shifts, first, n);
}
void CellCache::SetThreads(int threads) { cells_->SetThreads(ResolveThreads(threads)); }
void CellCache::Clear() { cells_->Clear(); }
CacheStats CellCache::Stats() const { return cells_->Stats(); }
int64_t CellCache::nbytes() const { return cells_->Stats().nbytes; }
int64_t CellCache::cells_per_stream() const { return cells_->cells(); }
int CellCache::streams() const { return cells_->streams(); }
const LayerShape& CellCache::shape() const { return cells_->context().shape; }

}  // namespace palu
