#include "ggml/ops.h"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "ggml/kv_buffer.h"
#include "ggml/kv_name.h"
#include "ggml/report.h"
#include "ggml/rope.h"
#include "palu/errors.h"

namespace palu::ggml {
namespace {

// A cache tensor of ours that a node reads or writes.
struct Kv {
  KvBuffer* buffer = nullptr;
  const KvSide* side = nullptr;

  explicit operator bool() const { return side != nullptr; }
};

Kv Find(const ggml_tensor* t) {
  if (t == nullptr) return {};
  auto* const buffer = static_cast<KvBuffer*>(BufferOf(t));
  if (buffer == nullptr) return {};
  return {buffer, buffer->Side(t)};
}

// Whether a node reads or writes a cache tensor of ours, which may have no memory yet.
bool IsKv(const ggml_tensor* t) {
  return t != nullptr && IsOfOurType(t) && ParseKvName(RootOf(t)->name).has_value();
}

float FloatParam(const ggml_tensor* t, int i) {
  float value;
  std::memcpy(&value, t->op_params + i, sizeof value);
  return value;
}

std::string Name(const Host& host, const ggml_tensor* t) {
  return std::string(host.functions.op_name(static_cast<int>(t->op))) + " of " + RootOf(t)->name;
}

// ---- SET_ROWS

// Rows of whole tokens; values of a cache without flash attention come one by one.
bool WritesTokens(const ggml_tensor* t) {
  return t->ne[0] == RootOf(t)->ne[0] && t->src[0]->ne[0] == t->ne[0];
}

void LearnRope(const Host& host, const Kv& kv, const ggml_tensor* t) {
  if (kv.side->values) return;
  const ggml_tensor* const rope = FindRope(t, host.functions.op_name);
  if (rope == nullptr) return;
  const std::optional<RopeParams> params = ReadRope(rope);
  if (!params) {
    Refuse("layer " + std::to_string(kv.side->layer) +
           " rotates its keys in a way that palu does not know; run without --device PALU");
  }
  kv.buffer->LearnRope(kv.side->layer, *params);
}

// The positions of the tokens whose keys a SET_ROWS node writes, as its ROPE node got them.
const int32_t* FindPositions(const Host& host, const ggml_tensor* t, int64_t n) {
  const ggml_tensor* const rope = FindRope(t, host.functions.op_name);
  if (rope == nullptr || rope->src[1] == nullptr || rope->src[1]->type != GGML_TYPE_I32 ||
      rope->src[1]->data == nullptr || rope->src[1]->ne[0] < n) {
    return nullptr;
  }
  return static_cast<const int32_t*>(rope->src[1]->data);
}

void SetRows(const Host& host, const Kv& kv, const ggml_tensor* t) {
  const ggml_tensor *rows = t->src[0], *index = t->src[1];
  const int64_t n = rows->ne[1];
  std::vector<int64_t> cells(static_cast<size_t>(n));
  const auto base = static_cast<int64_t>(t->view_offs / kv.side->row_bytes);
  for (int64_t i = 0; i < n; ++i) {
    const char* const at = static_cast<const char*>(index->data) + i * index->nb[0];
    cells[i] = base + (index->type == GGML_TYPE_I64 ? *reinterpret_cast<const int64_t*>(at)
                                                    : *reinterpret_cast<const int32_t*>(at));
  }
  const auto guard = kv.buffer->lock();
  CellCache& cache = kv.buffer->Cells(*kv.side);
  CellRows put{.cells = cells.data(),
               .n = n,
               .rows = static_cast<const float*>(rows->data),
               .stride = static_cast<int64_t>(rows->nb[1] / sizeof(float))};
  if (kv.side->values) {
    cache.PutValues(put);
    return;
  }
  put.positions = kv.buffer->StepPositions(kv.side->layer, FindPositions(host, t, n), n);
  put.rope = &kv.buffer->Rope(*kv.side);
  cache.PutKeys(put);
}

// ---- FLASH_ATTN_EXT

void CheckAttention(const Host& host, const ggml_tensor* t) {
  const ggml_tensor *q = t->src[0], *k = t->src[1], *v = t->src[2], *mask = t->src[3];
  const auto k_name = ParseKvName(RootOf(k)->name), v_name = ParseKvName(RootOf(v)->name);
  if (!IsKv(k) || !IsKv(v) || k_name->layer != v_name->layer || k_name->values || !v_name->values) {
    Refuse(std::string("attention reads K and V from ") + RootOf(k)->name + " and " +
           RootOf(v)->name +
           " (MLA and the like); palu does not support that, run without --device PALU");
  }
  const std::string where = "layer " + std::to_string(k_name->layer) + ": ";
  if (FloatParam(t, 1) != 0.0f) Refuse(where + "ALiBi is not supported; run without --device PALU");
  if (q->type != GGML_TYPE_F32 || (mask != nullptr && mask->type != GGML_TYPE_F16) ||
      q->ne[2] % k->ne[2] != 0) {
    Refuse(where + Name(host, t) + " has a form that palu does not know");
  }
  const Kv kv = Find(k);
  if (kv && !kv.buffer->LearnHeads(k_name->layer, static_cast<int>(k->ne[2]),
                                   static_cast<int>(k->ne[0]), static_cast<int>(v->ne[0]))) {
    Refuse(where + "its cache has " + std::to_string(kv.side->width) +
           " values per token, its attention reads " + std::to_string(k->ne[2]) + " heads of " +
           std::to_string(k->ne[0]) + "; palu does not support that");
  }
}

void Attend(const Kv& kv, const ggml_tensor* t) {
  const ggml_tensor *q = t->src[0], *k = t->src[1], *mask = t->src[3], *sinks = t->src[4];
  const int64_t n = q->ne[1], heads = q->ne[2], dim = q->ne[0], dim_v = t->ne[0];
  const auto floats = [](size_t bytes) { return static_cast<int64_t>(bytes / sizeof(float)); };
  const auto guard = kv.buffer->lock();
  CellCache& cache = kv.buffer->Cells(*kv.side);
  for (int64_t s = 0; s < q->ne[3]; ++s) {
    CellAttendArgs args;
    args.q = {static_cast<const char*>(q->data) + s * q->nb[3],
              DType::kF32,
              {1, heads, n, dim},
              {0, floats(q->nb[2]), floats(q->nb[1]), 1}};
    args.first = static_cast<int64_t>((k->view_offs + s * k->nb[3]) / kv.side->row_bytes);
    args.cells = k->ne[1];
    if (mask != nullptr) {
      const int64_t plane = mask->ne[3] > 1 ? s : 0;
      args.mask = reinterpret_cast<const uint16_t*>(static_cast<const char*>(mask->data) +
                                                    plane * mask->nb[3]);
      args.mask_stride = static_cast<int64_t>(mask->nb[1] / sizeof(uint16_t));
    }
    args.scale = FloatParam(t, 0);
    args.soft_cap = FloatParam(t, 2);
    args.sinks = sinks != nullptr ? static_cast<const float*>(sinks->data) : nullptr;
    const MutableTensor out{static_cast<char*>(t->data) + s * t->nb[3],
                            DType::kF32,
                            {1, heads, n, dim_v},
                            {0, floats(t->nb[1]), floats(t->nb[2]), 1}};
    cache.Attend(args, out);
  }
}

// ---- ROPE: a context shift, in place over a view of all cells

void Shift(const Kv& kv, const ggml_tensor* t) {
  const ggml_tensor* const shifts = t->src[1];
  const std::optional<RopeParams> rope = ReadRope(t);
  if (!rope || kv.side->values || t->view_offs % kv.side->row_bytes != 0 ||
      shifts->type != GGML_TYPE_I32) {
    Refuse("a context shift of layer " + std::to_string(kv.side->layer) +
           " has a form that palu does not know; start with --no-context-shift");
  }
  const auto guard = kv.buffer->lock();
  CellCache& cache = kv.buffer->Cells(*kv.side);
  const auto base = static_cast<int64_t>(t->view_offs / kv.side->row_bytes);
  for (int64_t done = 0; done < shifts->ne[0];) {
    const int64_t n =
        std::min(shifts->ne[0] - done, kv.side->cells - (base + done) % kv.side->cells);
    cache.Turn(*rope, static_cast<const int32_t*>(shifts->data) + done, base + done, n);
    done += n;
  }
}

}  // namespace

bool Supports(const Host& host, const ggml_tensor* t) {
  const int op = static_cast<int>(t->op);
  const Ops& ops = host.ops;
  if (op == ops.none || op == ops.view || op == ops.reshape || op == ops.permute ||
      op == ops.transpose) {
    return true;
  }
  if (IsKv(t) && op == ops.set_rows) {
    if (!WritesTokens(t)) {
      Refuse("needs flash attention: start with -fa on (it is off, or this model cannot have it)");
    }
    if (t->src[0]->type != GGML_TYPE_F32 || t->src[0]->nb[0] != sizeof(float)) {
      Refuse(
          "this model writes rows into its cache that are not f32, which palu does not know; run "
          "without --device PALU");
    }
    if (const Kv target = Find(t)) LearnRope(host, target, t);
    return true;
  }
  if (IsKv(t) && op == ops.rope) return true;
  if (op == ops.flash_attn_ext && (IsKv(t->src[1]) || IsKv(t->src[2]))) {
    CheckAttention(host, t);
    return true;
  }
  bool touches = IsKv(t);
  for (const ggml_tensor* source : t->src) touches = touches || IsKv(source);
  if (touches) {
    Refuse("this model works on its cache by " + Name(host, t) +
           ", which palu does not support (is flash attention off? start with -fa on)");
  }
  return false;
}

ggml_status Run(const Host& host, ggml_tensor* t, const Threads& threads) {
  constexpr int64_t kPrompt = 32;  // tokens that are worth a second pool of threads
  const int op = static_cast<int>(t->op);
  const Ops& ops = host.ops;
  const bool attends = op == ops.flash_attn_ext;
  const Kv kv = Find(attends ? t->src[1] : t);
  if (!kv || (op != ops.set_rows && op != ops.rope && !attends)) return GGML_STATUS_SUCCESS;
  const bool alone = !threads.shared && t->src[0]->ne[1] < kPrompt;
  kv.buffer->SetThreads(alone ? 1 : threads.count);
  try {
    if (op == ops.set_rows) {
      SetRows(host, kv, t);
    } else if (attends) {
      Attend(kv, t);
    } else {
      Shift(kv, t);
    }
    return GGML_STATUS_SUCCESS;
  } catch (const MemoryError& error) {
    if (op == ops.rope) Refuse(std::string("context shift failed: ") + error.what());
    Say(error.what());
    return GGML_STATUS_ALLOC_FAILED;
  } catch (const ConfigError& error) {
    Refuse(error.what());  // an option that this model excludes
  } catch (const FormatError& error) {
    Refuse(error.what());
  } catch (const std::exception& error) {
    if (op == ops.rope) Refuse(std::string("context shift failed: ") + error.what());
    Say(error.what());
    return GGML_STATUS_FAILED;
  }
}

}  // namespace palu::ggml
