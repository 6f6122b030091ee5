#include "cache/attention.h"

#include "cache/attention_common.h"

namespace palu {
namespace {

constexpr int64_t kDecodeRows = 2 * kMaxFusedRows;  // at most, to go over packed pages directly

}  // namespace

void AttendSequence(const Sequence& sequence, const AttendArgs& args, int64_t b,
                    const MutableTensor& out) {
  const AttendCall call(sequence, args, b, out);
  if (call.n == 1 || call.n * call.group <= kDecodeRows) {
    AttendDecode(call);
  } else {
    AttendPrefill(call);
  }
}

}  // namespace palu
