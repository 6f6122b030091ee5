#include "ggml/kv_buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "ggml/config.h"
#include "ggml/kv_name.h"
#include "ggml/report.h"

namespace palu::ggml {
namespace {

constexpr size_t kPage = 4096;        // of memory; tensors are aligned to it
constexpr int64_t kRowsAtOnce = 256;  // of a state that is read or written

// Buffers with a cache. ggml makes and frees them on any thread. Taken before a buffer's own lock.
std::mutex buffers_mutex;
std::set<const KvBuffer*> buffers;

// The cells and layers of each of them. Taken last.
struct Extent {
  int64_t cells = 0;
  std::set<int> layers;
};
std::mutex extents_mutex;
std::map<const KvBuffer*, Extent> extents;

// A model with sliding windows has two caches: that of the windowed layers has fewer cells, and the
// two share no layer.
bool IsWindowed(const KvBuffer* buffer) {
  const std::lock_guard guard(extents_mutex);
  const Extent& own = extents[buffer];
  return std::any_of(extents.begin(), extents.end(), [&](const auto& other) {
    return other.second.cells > own.cells &&
           std::none_of(own.layers.begin(), own.layers.end(),
                        [&](int layer) { return other.second.layers.contains(layer); });
  });
}

// For calls that ggml has no way to hear an error of.
template <typename F>
void OrRefuse(const char* what, const F& f) {
  try {
    f();
  } catch (const std::exception& error) {
    Refuse(std::string(what) + ": " + error.what());
  }
}

}  // namespace

std::unique_ptr<KvBuffer> KvBuffer::Make(const Host& host, size_t size) {
  const size_t bytes = (size + 2 * kPage - 1) / kPage * kPage;
  void* const base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  return std::unique_ptr<KvBuffer>(new KvBuffer(host, static_cast<uint8_t*>(base), bytes));
}

KvBuffer::KvBuffer(const Host& host, uint8_t* base, size_t size)
    : host_(host), base_(base), size_(size) {}

KvBuffer::~KvBuffer() {
  if (built_) Say("cache freed: " + Describe(Report()));
  if (!sides_.empty()) {
    const std::lock_guard guard(buffers_mutex);
    buffers.erase(this);
    const std::lock_guard last(extents_mutex);
    extents.erase(this);
  }
  munmap(base_, size_);
}

bool KvBuffer::InitTensor(ggml_tensor* tensor) {
  if (tensor->view_src || static_cast<int>(tensor->op) != host_.ops.none) return true;
  if (IsRecurrentName(tensor->name)) {
    Refuse(std::string("models with recurrent layers (") + tensor->name +
           ") are not supported; run without --device PALU");
  }
  const std::optional<KvName> name = ParseKvName(tensor->name);
  if (!name) return true;
  const int type = static_cast<int>(tensor->type);
  if (type != GGML_TYPE_F16 && type != GGML_TYPE_BF16) {
    Refuse(std::string("the cache type of ") + tensor->name +
           " must be f16 or bf16 (-ctk f16 -ctv f16): palu packs the cache itself, as PALU_CACHE "
           "says");
  }
  const std::lock_guard all(buffers_mutex);
  const std::lock_guard guard(mutex_);
  KvSide side{name->layer,   name->values,  type,         tensor->ne[0],
              tensor->ne[1], tensor->ne[2], tensor->nb[1]};
  sides_[tensor->data] = side;
  Layer& layer = layers_[name->layer];
  (name->values ? layer.v : layer.k) = side;
  mprotect(tensor->data, host_.functions.nbytes(tensor) / kPage * kPage, PROT_NONE);
  buffers.insert(this);
  const std::lock_guard last(extents_mutex);
  extents[this].cells = side.cells;
  extents[this].layers.insert(side.layer);
  return true;
}

const KvSide* KvBuffer::Side(const ggml_tensor* t) const {
  const auto found = sides_.find(RootOf(t)->data);
  if (found == sides_.end() || !ParseKvName(RootOf(t)->name)) return nullptr;
  return &found->second;
}

bool KvBuffer::LearnHeads(int layer, int kv_heads, int head_dim_k, int head_dim_v) {
  const std::lock_guard guard(mutex_);
  Layer& known = layers_[layer];
  const LayerShape shape{layer, kv_heads, head_dim_k, head_dim_v, 0};
  if (!known.k || !known.v || known.k->width != int64_t{kv_heads} * head_dim_k ||
      known.v->width != int64_t{kv_heads} * head_dim_v || known.k->cells != known.v->cells) {
    return false;
  }
  if (known.shape.kv_heads > 0) {
    return known.shape.kv_heads == kv_heads && known.shape.head_dim_k == head_dim_k;
  }
  known.shape = shape;
  return true;
}

void KvBuffer::LearnRope(int layer, RopeParams rope) {
  const std::lock_guard guard(mutex_);
  if (!built_) layers_[layer].rope = std::move(rope);
}

void KvBuffer::Build() {
  const KvSide& first = *layers_.begin()->second.k;
  ModelShape model;
  model.partial = true;  // windowed layers are in a buffer of their own, others may not be ours
  model.context = first.cells;
  model.threads = threads_;
  const bool windowed = IsWindowed(this);
  for (const auto& [index, layer] : layers_) {
    if (layer.shape.kv_heads == 0) {
      throw StateError("layer " + std::to_string(index) +
                       ": no attention over its cache was seen before it was used");
    }
    model.layers.push_back(layer.shape);
    if (windowed) model.layers.back().window = static_cast<int>(first.cells);
  }
  std::vector<CellCache> caches = KVCacheBuilder::CellsForModel(model, CacheConfig(), first.cells,
                                                                static_cast<int>(first.streams));
  size_t i = 0;
  for (auto& [index, layer] : layers_) {
    layer.cells = std::make_unique<CellCache>(std::move(caches[i++]));
  }
  built_ = true;
  const int64_t full = first.cells * first.streams;
  const int64_t bytes = KVCacheBuilder::EstimateBytes(model, CacheConfig(), full);
  int64_t elements = 0;
  for (const auto& [index, layer] : layers_) elements += layer.k->width + layer.v->width;
  char text[256];
  std::snprintf(text, sizeof text,
                "KV cache of %zu layers%s, %lld x %lld cells: %.2f bits per element when full, "
                "%.0f bytes per token (f16: %lld)",
                layers_.size(), windowed ? " with sliding windows" : "",
                static_cast<long long>(first.streams), static_cast<long long>(first.cells),
                8.0 * static_cast<double>(bytes) / static_cast<double>(full * elements),
                static_cast<double>(bytes) / static_cast<double>(full),
                static_cast<long long>(2 * elements));
  Say(text);
  Tell("cache", text);
}

CellCache& KvBuffer::Cells(const KvSide& side) {
  if (!built_) Build();
  return *layers_.at(side.layer).cells;
}

void KvBuffer::SetThreads(int threads) {
  const std::lock_guard guard(mutex_);
  if (threads == threads_) return;
  threads_ = threads;
  for (auto& [index, layer] : layers_) {
    if (layer.cells) layer.cells->SetThreads(threads);
  }
}

const int32_t* KvBuffer::StepPositions(int layer, const int32_t* found, int64_t n) {
  if (layer <= last_layer_) step_positions_.clear();
  last_layer_ = layer;
  if (step_positions_.empty() && found) step_positions_.assign(found, found + n);
  const bool known =
      static_cast<int64_t>(step_positions_.size()) == n &&
      std::all_of(step_positions_.begin(), step_positions_.end(), [](int32_t p) { return p >= 0; });
  return known ? step_positions_.data() : nullptr;
}

// ---- state, slots, prompt caches: rows in the nominal type

void KvBuffer::Get(const ggml_tensor* tensor, void* data, size_t offset, size_t size) {
  const KvSide* const side = Side(tensor);
  if (!side) {
    std::memcpy(data, static_cast<const char*>(tensor->data) + offset, size);
    return;
  }
  const auto guard = lock();
  OrRefuse("reading the cache", [&] {
    ReadBytes(*side, tensor->view_offs + offset, size, static_cast<uint8_t*>(data));
  });
}

void KvBuffer::ReadBytes(const KvSide& side, size_t at, size_t size, uint8_t* out) {
  const size_t end = at + size, type_size = side.row_bytes / static_cast<size_t>(side.width);
  const CellCache& cells = Cells(side);
  std::vector<float> rows;
  std::vector<uint8_t> nominal;
  while (at < end) {
    const auto first = static_cast<int64_t>(at / side.row_bytes);
    const size_t skip = at % side.row_bytes;
    const int64_t left = side.cells - first % side.cells;  // in this stream
    const int64_t n = std::min<int64_t>(
        {kRowsAtOnce, left,
         static_cast<int64_t>((skip + end - at + side.row_bytes - 1) / side.row_bytes)});
    rows.resize(static_cast<size_t>(n * side.width));
    nominal.resize(rows.size() * type_size);
    cells.Read(side.values, first, n, rows.data());
    host_.functions.type_traits(side.type)->from_float_ref(rows.data(), nominal.data(),
                                                           static_cast<int64_t>(rows.size()));
    const size_t some = std::min(end - at, nominal.size() - skip);
    std::memcpy(out, nominal.data() + skip, some);
    out += some;
    at += some;
  }
}

void KvBuffer::PutRows(const KvSide& side, int64_t first, const std::vector<float>& rows) {
  std::vector<int64_t> cells(rows.size() / static_cast<size_t>(side.width));
  for (size_t i = 0; i < cells.size(); ++i) cells[i] = first + static_cast<int64_t>(i);
  CellCache& cache = Cells(side);
  const CellRows put{.cells = cells.data(),
                     .n = static_cast<int64_t>(cells.size()),
                     .rows = rows.data(),
                     .rope = side.values ? nullptr : &Rope(side)};
  if (side.values) {
    cache.PutValues(put);
    cache.Seal();  // a state is not attended while it comes
  } else {
    cache.PutKeys(put);
  }
}

void KvBuffer::Set(ggml_tensor* tensor, const void* data, size_t offset, size_t size) {
  const KvSide* const side = Side(tensor);
  if (!side) {
    std::memcpy(static_cast<char*>(tensor->data) + offset, data, size);
    return;
  }
  const size_t at = tensor->view_offs + offset;
  if (at % side->row_bytes != 0 || size % side->row_bytes != 0) {
    Refuse("a part of a row was to be written into the cache; only whole tokens can be");
  }
  const auto guard = lock();
  OrRefuse("writing into the cache", [&] {
    WriteTokens(*side, static_cast<int64_t>(at / side->row_bytes),
                static_cast<int64_t>(size / side->row_bytes), static_cast<const uint8_t*>(data));
  });
}

void KvBuffer::WriteTokens(const KvSide& side, int64_t first, int64_t left, const uint8_t* in) {
  std::vector<float> rows;
  while (left > 0) {
    const int64_t n = std::min(left, kRowsAtOnce);
    rows.resize(static_cast<size_t>(n * side.width));
    host_.functions.type_traits(side.type)->to_float(in, rows.data(),
                                                     static_cast<int64_t>(rows.size()));
    PutRows(side, first, rows);
    in += static_cast<size_t>(n) * side.row_bytes;
    first += n;
    left -= n;
  }
}

void KvBuffer::Memset(ggml_tensor* tensor, uint8_t value, size_t offset, size_t size) {
  if (!Side(tensor)) {
    std::memset(static_cast<char*>(tensor->data) + offset, value, size);
    return;
  }
  const std::vector<uint8_t> bytes(size, value);
  Set(tensor, bytes.data(), offset, size);
}

bool KvBuffer::Copy(const ggml_tensor* src, ggml_tensor* dst) {
  const KvSide* const to = Side(dst);
  const KvSide* const from = BufferOf(src) == this ? Side(src) : nullptr;
  if (!to || !from || to->layer != from->layer || to->values != from->values) return false;
  if (src->view_offs % from->row_bytes != 0 || dst->view_offs % to->row_bytes != 0) return false;
  const size_t bytes = host_.functions.nbytes(src);
  if (bytes % from->row_bytes != 0) return false;
  const auto guard = lock();
  OrRefuse("copying a sequence", [&] {
    Cells(*to).Copy(to->values, static_cast<int64_t>(src->view_offs / from->row_bytes),
                    static_cast<int64_t>(dst->view_offs / to->row_bytes),
                    static_cast<int64_t>(bytes / from->row_bytes));
  });
  return true;
}

void KvBuffer::Clear(uint8_t value) {
  if (sides_.empty()) {
    std::memset(base_, value, size_);
    return;
  }
  const auto guard = lock();
  TellReserved();
  for (auto& [index, layer] : layers_) {
    if (layer.cells) layer.cells->Clear();
  }
}

// llama.cpp clears a cache once all of its tensors are placed, before anything is in it. Known that
// early, the layers tell a program that gave us only some of them from one that has not run yet.
void KvBuffer::TellReserved() {
  if (reserved_) return;
  reserved_ = true;
  Tell("reserved", std::to_string(layers_.size()) + " layers");
}

KvReport KvBuffer::Report() const {
  const auto guard = lock();
  KvReport r;
  r.layers = static_cast<int>(layers_.size());
  if (layers_.empty() || !layers_.begin()->second.k) return r;
  r.cells = layers_.begin()->second.k->cells;
  r.streams = layers_.begin()->second.k->streams;
  for (const auto& [index, layer] : layers_) {
    if (!layer.cells) continue;
    const CacheStats stats = layer.cells->Stats();
    r.tokens = std::max(r.tokens, stats.tokens);
    r.bytes += stats.nbytes;
    r.fp16_bytes += stats.fp16_bytes;
    r.peak_bytes = KVCacheBuilder::Memory(*layer.cells).peak_bytes;  // one account for all
  }
  return r;
}

std::vector<KvReport> AllReports() {
  const std::lock_guard guard(buffers_mutex);
  std::vector<KvReport> reports;
  for (const KvBuffer* buffer : buffers) reports.push_back(buffer->Report());
  return reports;
}

}  // namespace palu::ggml
