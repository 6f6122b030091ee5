#include "llama/ggml_attention.h"

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpp.h>
#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "llama/log.h"
#include "llama/native_config.h"
#include "palu/errors.h"

namespace palu::llama {
namespace {

constexpr int64_t kCellPadding = 256;
constexpr size_t kNodesPerLayer = 16;  // views included; 10 are used

int64_t Cells(const GgmlAttentionOptions& o) {
  return (o.tokens + kCellPadding - 1) / kCellPadding * kCellPadding;
}

// Parses the cache and checks it against the shape.
NativeConfig CheckedConfig(const GgmlAttentionOptions& o) {
  const NativeConfig config = ParseNativeConfig(o.cache);
  for (const ggml_type type : {config.type_k, config.type_v}) {
    if (o.head_dim % ggml_blck_size(type) == 0) continue;
    throw ConfigError("cache '" + o.cache + "' with head_dim " + std::to_string(o.head_dim) +
                      "; allowed: multiples of " + std::to_string(ggml_blck_size(type)));
  }
  return config;
}

void Convert(ggml_type type, const float* from, void* to, int64_t rows, int64_t columns) {
  if (type == GGML_TYPE_F32) {
    std::memcpy(to, from, sizeof(float) * rows * columns);
  } else {
    ggml_quantize_chunk(type, from, to, 0, rows, columns, nullptr);
  }
}

ggml_context_ptr MakeContext(size_t tensors, size_t graphs = 0, size_t nodes = 0) {
  const size_t bytes =
      tensors * ggml_tensor_overhead() + graphs * ggml_graph_overhead_custom(nodes, false);
  ggml_context* context = ggml_init({bytes, nullptr, /*no_alloc=*/true});
  if (context == nullptr) throw MemoryError("no memory for the graphs of llama.cpp's attention");
  return ggml_context_ptr(context);
}

ggml_backend_ptr MakeBackend(int threads) {
  SilenceLog();
  ggml_backend_ptr backend(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
  if (backend == nullptr) throw StateError("the installed ggml has no CPU backend");
  const auto reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend.get()));
  const auto set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
      ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
  if (set_threads == nullptr) throw StateError("the installed ggml cannot set its threads");
  set_threads(backend.get(), threads);
  return backend;
}

}  // namespace

struct GgmlAttention::Impl {
  explicit Impl(const GgmlAttentionOptions& o)
      : options(o), config(CheckedConfig(o)), cells(Cells(o)), backend(MakeBackend(o.threads)) {}

  GgmlAttentionOptions options;
  NativeConfig config;
  int64_t cells;
  ggml_backend_ptr backend;
  ggml_context_ptr cache_context, input_context, graph_context;
  ggml_backend_buffer_ptr cache_buffer, input_buffer;
  ggml_gallocr_ptr allocator;
  std::vector<ggml_tensor*> k, v;
  ggml_tensor *queries = nullptr, *mask = nullptr;
  std::vector<ggml_cgraph*> graphs;
  std::vector<ggml_tensor*> outputs;  // of the last layer of each graph

  void MakeCache();
  void MakeInputs(std::span<const float> q, int n);
  void WriteMask(int n);
  // Nodes of one layer, as llm_graph_context::build_attn_mha makes them.
  ggml_tensor* Attention(int layer) const;
  ggml_tensor* KeysView(int layer) const;
  ggml_tensor* ValuesView(int layer) const;
};

void GgmlAttention::Impl::MakeCache() {
  cache_context = MakeContext(2 * static_cast<size_t>(options.layers));
  ggml_context* c = cache_context.get();
  const int64_t width = int64_t{options.kv_heads} * options.head_dim;
  for (int layer = 0; layer < options.layers; ++layer) {
    k.push_back(ggml_new_tensor_2d(c, config.type_k, width, cells));
    v.push_back(config.flash_off() ? ggml_new_tensor_2d(c, config.type_v, cells, width)
                                   : ggml_new_tensor_2d(c, config.type_v, width, cells));
  }
  cache_buffer.reset(ggml_backend_alloc_ctx_tensors(c, backend.get()));
  if (cache_buffer == nullptr) {
    throw MemoryError("llama.cpp's cache of " + std::to_string(options.layers) + " layers x " +
                      std::to_string(cells) + " cells does not fit the memory");
  }
  ggml_backend_buffer_clear(cache_buffer.get(), 0);
}

ggml_tensor* GgmlAttention::Impl::KeysView(int layer) const {
  const ggml_type type = config.type_k;
  return ggml_view_3d(graph_context.get(), k[layer], options.head_dim, cells, options.kv_heads,
                      k[layer]->nb[1], ggml_row_size(type, options.head_dim), 0);
}

ggml_tensor* GgmlAttention::Impl::ValuesView(int layer) const {
  ggml_context* c = graph_context.get();
  if (!config.flash_off()) {
    return ggml_view_3d(c, v[layer], options.head_dim, cells, options.kv_heads, v[layer]->nb[1],
                        ggml_row_size(config.type_v, options.head_dim), 0);
  }
  return ggml_view_3d(c, v[layer], cells, options.head_dim, options.kv_heads, v[layer]->nb[1],
                      v[layer]->nb[1] * options.head_dim, 0);
}

ggml_tensor* GgmlAttention::Impl::Attention(int layer) const {
  ggml_context* c = graph_context.get();
  const float scale = 1.0f / std::sqrt(static_cast<float>(options.head_dim));
  ggml_tensor* q = ggml_permute(c, queries, 0, 2, 1, 3);
  ggml_tensor *keys = KeysView(layer), *values = ValuesView(layer);
  if (!config.flash_off()) {
    if (keys->type == GGML_TYPE_F32) keys = ggml_cast(c, keys, GGML_TYPE_F16);
    if (values->type == GGML_TYPE_F32) values = ggml_cast(c, values, GGML_TYPE_F16);
    ggml_tensor* out = ggml_flash_attn_ext(c, q, keys, values, mask, scale, 0.0f, 0.0f);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    return out;
  }
  ggml_tensor* scores = ggml_mul_mat(c, keys, q);
  ggml_prec_set_acc(scores, GGML_PREC_F32);
  scores = ggml_soft_max_ext(c, scores, mask, scale, 0.0f);
  ggml_tensor* out = ggml_permute(c, ggml_mul_mat(c, values, scores), 0, 2, 1, 3);
  return ggml_cont_2d(c, out, out->ne[0] * out->ne[1], out->ne[2]);
}

void GgmlAttention::Impl::WriteMask(int n) {
  const auto hidden = -std::numeric_limits<float>::infinity();
  std::vector<float> row(cells);
  for (int i = 0; i < n; ++i) {
    const int64_t visible = options.tokens - n + i + 1;
    for (int64_t t = 0; t < cells; ++t) row[t] = t < visible ? 0.0f : hidden;
    void* to = static_cast<char*>(mask->data) + i * mask->nb[1];
    if (mask->type == GGML_TYPE_F16) {
      ggml_fp32_to_fp16_row(row.data(), static_cast<ggml_fp16_t*>(to), cells);
    } else {
      std::memcpy(to, row.data(), cells * sizeof(float));
    }
  }
}

void GgmlAttention::Impl::MakeInputs(std::span<const float> q, int n) {
  input_context = MakeContext(2);
  ggml_context* c = input_context.get();
  queries = ggml_new_tensor_3d(c, GGML_TYPE_F32, options.head_dim, options.query_heads, n);
  mask = ggml_new_tensor_2d(c, config.flash_off() ? GGML_TYPE_F32 : GGML_TYPE_F16, cells, n);
  input_buffer.reset(ggml_backend_alloc_ctx_tensors(c, backend.get()));
  if (input_buffer == nullptr) throw MemoryError("no memory for the mask of llama.cpp's attention");
  std::memcpy(queries->data, q.data(), q.size_bytes());
  WriteMask(n);
}

GgmlAttention::GgmlAttention(const GgmlAttentionOptions& options)
    : impl_(std::make_unique<Impl>(options)) {
  impl_->MakeCache();
}

GgmlAttention::~GgmlAttention() = default;

int64_t GgmlAttention::LayerBytes(const GgmlAttentionOptions& o) {
  const NativeConfig config = CheckedConfig(o);
  const int64_t width = int64_t{o.kv_heads} * o.head_dim;
  return Cells(o) * static_cast<int64_t>(ggml_row_size(config.type_k, width) +
                                         ggml_row_size(config.type_v, width));
}

int64_t GgmlAttention::ScratchBytes(const GgmlAttentionOptions& o, int queries) {
  const NativeConfig config = CheckedConfig(o);
  const int64_t cells = Cells(o);
  const int64_t mask = cells * queries * (config.flash_off() ? 4 : 2);
  // Without flash attention scores of all cells exist at once; with it f32 caches are cast.
  if (config.flash_off()) return mask + 2 * cells * queries * o.query_heads * 4;
  const bool casts = config.type_k == GGML_TYPE_F32 || config.type_v == GGML_TYPE_F32;
  return mask + (casts ? cells * o.kv_heads * o.head_dim * 4 : 0);
}

void GgmlAttention::Fill(int64_t position, const ConstTensor& k, const ConstTensor& v) {
  Impl& s = *impl_;
  const int64_t heads = s.options.kv_heads, dim = s.options.head_dim, n = k.shape[2];
  const std::array<int64_t, 4> shape = {1, heads, n, dim};
  if (k.shape != shape || v.shape != shape || k.dtype != DType::kF32 || v.dtype != DType::kF32) {
    throw InputError("K and V must be f32 [1, " + std::to_string(heads) + ", n, " +
                     std::to_string(dim) + "]");
  }
  if (position < 0 || position + n > s.options.tokens) {
    throw InputError(std::to_string(position) + " + " + std::to_string(n) +
                     " tokens; there is room for " + std::to_string(s.options.tokens));
  }
  const auto* keys = static_cast<const float*>(k.data);
  const auto* values = static_cast<const float*>(v.data);
  const int64_t width = heads * dim;
  std::vector<float> key_rows(n * width), value_rows(n * width);  // [n, width]; V: [width, n]
  const bool transposed = s.config.flash_off();
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < n; ++t) {
      std::copy_n(keys + (h * n + t) * dim, dim, &key_rows[t * width + h * dim]);
      const float* value = values + (h * n + t) * dim;
      if (!transposed) std::copy_n(value, dim, &value_rows[t * width + h * dim]);
      for (int64_t d = 0; transposed && d < dim; ++d) value_rows[(h * dim + d) * n + t] = value[d];
    }
  }
  const size_t key_bytes = ggml_row_size(s.config.type_k, width);
  // Bytes of one run of V that lies together: a cell, or n cells of one channel.
  const int64_t runs = transposed ? width : n, run = transposed ? n : width;
  const size_t run_bytes =
      transposed ? ggml_type_size(s.config.type_v) * n : ggml_row_size(s.config.type_v, width);
  const size_t first =
      transposed ? position * ggml_type_size(s.config.type_v) : position * s.v[0]->nb[1];
  std::vector<char> key_cells(n * key_bytes), value_cells(runs * run_bytes);
  Convert(s.config.type_k, key_rows.data(), key_cells.data(), n, width);
  Convert(s.config.type_v, value_rows.data(), value_cells.data(), runs, run);
  for (int layer = 0; layer < s.options.layers; ++layer) {
    std::memcpy(static_cast<char*>(s.k[layer]->data) + position * key_bytes, key_cells.data(),
                key_cells.size());
    char* to = static_cast<char*>(s.v[layer]->data) + first;
    for (int64_t i = 0; i < runs; ++i) {
      std::memcpy(to + i * s.v[layer]->nb[1], &value_cells[i * run_bytes], run_bytes);
    }
  }
}

void GgmlAttention::Prepare(std::span<const float> q, int n, int group) {
  Impl& s = *impl_;
  if (n < 1 || n > s.options.tokens || group < 1 || group > s.options.layers ||
      q.size() != static_cast<size_t>(n) * s.options.query_heads * s.options.head_dim) {
    throw InputError("queries of " + std::to_string(n) + " tokens in groups of " +
                     std::to_string(group) + " layers; there are " +
                     std::to_string(s.options.tokens) + " tokens and " +
                     std::to_string(s.options.layers) + " layers");
  }
  s.graphs.clear();
  s.outputs.clear();
  s.allocator.reset();
  s.MakeInputs(q, n);
  const size_t nodes = kNodesPerLayer * group;
  const int graphs = s.options.layers / group;
  s.graph_context = MakeContext(nodes * graphs, graphs, nodes);
  for (int g = 0; g < graphs; ++g) {
    ggml_cgraph* graph = ggml_new_graph_custom(s.graph_context.get(), nodes, false);
    for (int i = 0; i < group; ++i) {
      ggml_tensor* out = s.Attention(g * group + i);
      ggml_build_forward_expand(graph, out);
      if (i + 1 == group) {
        ggml_set_output(out);
        s.outputs.push_back(out);
      }
    }
    s.graphs.push_back(graph);
  }
  // All graphs are alike, so that what one of them needs serves them all in turn.
  const auto type = ggml_backend_get_default_buffer_type(s.backend.get());
  s.allocator.reset(ggml_gallocr_new(type));
  for (ggml_cgraph* graph : s.graphs) {
    if (!ggml_gallocr_alloc_graph(s.allocator.get(), graph)) {
      throw MemoryError("no memory for the scores of llama.cpp's attention");
    }
  }
}

int GgmlAttention::groups() const { return static_cast<int>(impl_->graphs.size()); }

void GgmlAttention::Run(int group) {
  const ErrorLog log;
  const auto status = ggml_backend_graph_compute(impl_->backend.get(), impl_->graphs[group]);
  if (status != GGML_STATUS_SUCCESS) {
    throw StateError("llama.cpp's attention failed (" + std::string(ggml_status_to_string(status)) +
                     ")" + log.suffix());
  }
}

std::span<const float> GgmlAttention::Output(int group) const {
  const ggml_tensor* out = impl_->outputs[group];
  return {static_cast<const float*>(out->data), static_cast<size_t>(ggml_nelements(out))};
}

}  // namespace palu::llama
