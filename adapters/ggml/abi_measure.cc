// File: abi_measure.cc - the layout of the running ggml's objects, measured on objects of its own.
#include "abi_measure.h"

#include <cstring>
#include <type_traits>

namespace palu::ggml {
namespace {

// The longest row of words that is searched: more than any struct in the table has. Reading a few
// words past a smaller object of the heap is harmless; static ones are searched no further than
// their known size.
constexpr int kMaxWords = 24;

// Functions by name; remembers the first that is missing.
class Symbols {
 public:
  explicit Symbols(const Lookup& lookup) : lookup_(lookup) {}
  template <class F>
  F* Get(const char* name) {
    static_assert(std::is_function_v<F>);
    void* found = lookup_(name);
    if (found == nullptr && missing_.empty()) missing_ = name;
    return reinterpret_cast<F*>(found);
  }
  const std::string& missing() const { return missing_; }

 private:
  const Lookup& lookup_;
  std::string missing_;
};

std::string Missing(const std::string& name) {
  return "the running ggml has no function " + name + " (releases before 2025-07 do not)";
}

// The first word of `object` from `first` on that is `value`, or -1.
int FindWord(const void* object, const void* value, int first, int end) {
  for (int i = first; i < end; ++i) {
    if (Word(object, i) == value) return i;
  }
  return -1;
}

// Where a buffer keeps its type: behind its functions.
int MeasureBuffer(Symbols& symbols) {
  auto* cpu_type = symbols.Get<ggml_backend_buffer_type*()>("ggml_backend_cpu_buffer_type");
  auto* alloc = symbols.Get<ggml_backend_buffer*(ggml_backend_buffer_type*, size_t)>(
      "ggml_backend_buft_alloc_buffer");
  auto* release = symbols.Get<void(ggml_backend_buffer*)>("ggml_backend_buffer_free");
  if (!symbols.missing().empty()) return -1;
  ggml_backend_buffer_type* type = cpu_type();
  ggml_backend_buffer* buffer = alloc(type, 64);
  if (buffer == nullptr) return -1;
  const int found = FindWord(buffer, type, 1, kMaxWords);
  release(buffer);
  return found;
}

// Where a backend keeps its device: behind its functions.
int MeasureBackend(Symbols& symbols, ggml_backend_device* cpu) {
  auto* init =
      symbols.Get<ggml_backend*(ggml_backend_device*, const char*)>("ggml_backend_dev_init");
  auto* release = symbols.Get<void(ggml_backend*)>("ggml_backend_free");
  if (!symbols.missing().empty()) return -1;
  ggml_backend* backend = init(cpu, nullptr);
  if (backend == nullptr) return -1;
  const int found = FindWord(backend, cpu, 1, kMaxWords);
  release(backend);
  return found;
}

// Buffer types of the CPU beside the plain one know their device. kBuftDevice when there is none to
// look at: it never moved.
int MeasureBufferType(Symbols& symbols, ggml_backend_device* cpu, ggml_backend_reg* reg) {
  auto* proc =
      symbols.Get<void*(ggml_backend_reg*, const char*)>("ggml_backend_reg_get_proc_address");
  auto* device_of =
      symbols.Get<ggml_backend_device*(ggml_backend_buffer_type*)>("ggml_backend_buft_get_device");
  if (!symbols.missing().empty()) return -1;
  using ExtraTypes = ggml_backend_buffer_type**(ggml_backend_device*);
  auto* extra = reinterpret_cast<ExtraTypes*>(proc(reg, "ggml_backend_dev_get_extra_bufts"));
  ggml_backend_buffer_type** types = extra != nullptr ? extra(cpu) : nullptr;
  for (; types != nullptr && *types != nullptr; ++types) {
    if (device_of(*types) == cpu) return FindWord(*types, cpu, 1, kBuftWords);
  }
  return kBuftDevice;
}

// The CPU can make buffers from host memory and says so in the third of its caps; whatever is not
// written stays 0. `room` is larger than the struct of any generation.
void MeasureProps(Symbols& symbols, ggml_backend_device* cpu, Measured* out) {
  auto* get_props = symbols.Get<void(ggml_backend_device*, void*)>("ggml_backend_dev_get_props");
  if (!symbols.missing().empty()) return;
  alignas(16) unsigned char room[512] = {};
  get_props(cpu, room);
  for (const Layout& layout : kLayouts) {
    const unsigned char* caps = room + layout.caps_byte;
    // Elsewhere this byte is part of the pointer to the device's id (null for the CPU) or of a size
    // that ends in zeros, so 1 is a cap.
    if (caps[2] == 1 && caps[0] == 0 && caps[1] == 0) {
      out->caps_byte = layout.caps_byte;
      out->mmap_support = caps[4] == 1;
    }
  }
}

}  // namespace

std::string Measured::Text() const {
  return "API " + std::to_string(api_version) + ", buffer " + std::to_string(buffer_buft) +
         ", backend " + std::to_string(backend_device) + ", device " + std::to_string(device_reg) +
         ", buffer type " + std::to_string(buft_device) + ", caps " + std::to_string(caps_byte) +
         (mmap_support ? " with mmap" : "");
}

std::variant<Measured, std::string> Measure(const Lookup& lookup) {
  Symbols symbols(lookup);
  auto* by_type = symbols.Get<ggml_backend_device*(int)>("ggml_backend_dev_by_type");
  auto* reg_of =
      symbols.Get<ggml_backend_reg*(ggml_backend_device*)>("ggml_backend_dev_backend_reg");
  if (!symbols.missing().empty()) return Missing(symbols.missing());
  ggml_backend_device* cpu = by_type(kCpuDevice);
  if (cpu == nullptr) {
    return "ggml has no CPU backend yet: load it first (ggml_backend_load_all), then this plug-in";
  }
  ggml_backend_reg* reg = reg_of(cpu);
  Measured measured;
  std::memcpy(&measured.api_version, reg, sizeof(int));
  measured.device_reg = FindWord(cpu, reg, 1, kDeviceWords);
  measured.buffer_buft = MeasureBuffer(symbols);
  measured.backend_device = MeasureBackend(symbols, cpu);
  measured.buft_device = MeasureBufferType(symbols, cpu, reg);
  MeasureProps(symbols, cpu, &measured);
  if (!symbols.missing().empty()) return Missing(symbols.missing());
  return measured;
}

const Layout* MatchLayout(const Measured& measured) {
  if (measured.device_reg != kDeviceReg || measured.buft_device != kBuftDevice) return nullptr;
  for (const Layout& layout : kLayouts) {
    if (measured.api_version == layout.api_version && measured.buffer_buft == layout.buffer_buft &&
        measured.backend_device == layout.backend_device &&
        measured.caps_byte == layout.caps_byte && measured.mmap_support == layout.mmap_support) {
      return &layout;
    }
  }
  return nullptr;
}

std::variant<int32_t, std::string> CheckTensors(const Lookup& lookup, const Ops& ops) {
  constexpr int32_t kComputeFlag = 16;  // GGML_TENSOR_FLAG_COMPUTE where it exists
  Symbols symbols(lookup);
  auto* init = symbols.Get<ggml_context*(ggml_init_params)>("ggml_init");
  auto* release = symbols.Get<void(ggml_context*)>("ggml_free");
  auto* overhead = symbols.Get<size_t()>("ggml_tensor_overhead");
  auto* graph_overhead = symbols.Get<size_t()>("ggml_graph_overhead");
  auto* new_tensor =
      symbols.Get<ggml_tensor*(ggml_context*, int, int64_t, int64_t, int64_t, int64_t)>(
          "ggml_new_tensor_4d");
  auto* view =
      symbols.Get<ggml_tensor*(ggml_context*, ggml_tensor*, int64_t, size_t)>("ggml_view_1d");
  auto* scale = symbols.Get<ggml_tensor*(ggml_context*, ggml_tensor*, float)>("ggml_scale");
  auto* name_of = symbols.Get<const char*(const ggml_tensor*)>("ggml_get_name");
  auto* new_graph = symbols.Get<ggml_cgraph*(ggml_context*)>("ggml_new_graph");
  auto* expand = symbols.Get<void(ggml_cgraph*, ggml_tensor*)>("ggml_build_forward_expand");
  auto* nodes_of = symbols.Get<ggml_tensor**(ggml_cgraph*)>("ggml_graph_nodes");
  auto* n_nodes = symbols.Get<int(ggml_cgraph*)>("ggml_graph_n_nodes");
  if (!symbols.missing().empty()) return Missing(symbols.missing());

  ggml_context* ctx = init({8 * overhead() + graph_overhead() + 1024, nullptr, true});
  if (ctx == nullptr) return "no memory to examine ggml's tensors";
  ggml_tensor* plain = new_tensor(ctx, GGML_TYPE_F16, 3, 5, 7, 11);
  ggml_tensor* part = view(ctx, plain, 4, 6);
  ggml_tensor* scaled = scale(ctx, part, 2.5F);
  ggml_cgraph* graph = new_graph(ctx);
  expand(graph, scaled);

  float factor = 0;
  std::memcpy(&factor, scaled->op_params, sizeof factor);
  int prefix[2];  // size, n_nodes
  std::memcpy(prefix, graph, sizeof prefix);
  const int32_t flag = scaled->flags & kComputeFlag;
  const bool tensors = plain->type == GGML_TYPE_F16 && plain->ne[0] == 3 && plain->ne[3] == 11 &&
                       plain->nb[1] == 6 && plain->nb[3] == 210 && name_of(plain) == plain->name &&
                       plain->buffer == nullptr && plain->data == nullptr &&
                       plain->view_src == nullptr && part->view_src == plain &&
                       part->view_offs == 6 && static_cast<int>(part->op) == ops.view &&
                       static_cast<int>(scaled->op) == ops.scale && scaled->src[0] == part &&
                       scaled->src[1] == nullptr && factor == 2.5F;
  const bool graphs = n_nodes(graph) == 2 && prefix[1] == 2 && nodes_of(graph) == Word(graph, 2) &&
                      nodes_of(graph)[1] == scaled;
  release(ctx);
  if (!tensors) return "the fields of ggml_tensor are not where they were since 2025-07";
  if (!graphs) return "the fields of ggml_cgraph are not where they were since 2025-07";
  return flag;
}

}  // namespace palu::ggml
