#include "cache/attention.h"

#include "cache/attention_common.h"

namespace palu {
namespace {

constexpr int64_t kDecodeRows = 2 * kMaxFusedRows;  // at most, to go over packed pages directly

}  // namespace

void Attend(const AttendCall& call) {
  if (call.n == 1 || call.n * call.group <= kDecodeRows) {
    AttendDecode(call);
  } else {
    AttendPrefill(call);
  }
}

void AttendSequence(const Sequence& sequence, const AttendArgs& args, int64_t b,
                    const MutableTensor& out) {
  thread_local TokenView view;  // keeps its memory from call to call
  sequence.FillView(view);
  Attend(AttendCall(view, args, b, out));
}

}  // namespace palu
