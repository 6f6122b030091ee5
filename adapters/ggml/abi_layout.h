// File: abi_layout.h - the table of generations: where ggml's internal structs differ.
//
// A backend struct is a row of words: first the function pointers of its iface, then its fields.
// All offsets here are words of a pointer's size. What never moved since 2025-07:
//   ggml_backend_buffer_type  0 get_name, 1 alloc_buffer, 2 get_alignment, 3 get_max_size,
//                             4 get_alloc_size, 5 is_host; 6 device, 7 context
//   ggml_backend_buffer       0 free_buffer, 1 get_base, 2 init_tensor, 3 memset_tensor,
//                             4 set_tensor, 5 get_tensor; then as in the table
//   ggml_backend              0 guid, 1 get_name, 2 free; then as in the table
//   ggml_backend_device       0 get_name, 1 get_description, 2 get_memory, 3 get_type, 4 get_props,
//                             5 init_backend, 6 get_buffer_type, 7 get_host_buffer_type,
//                             8 buffer_from_host_ptr, 9 supports_op, 10 supports_buft,
//                             11 offload_op, 12-14 events; 15 reg, 16 context
//   ggml_backend_reg          0 api_version (int), 1 get_name, 2 get_device_count, 3 get_device,
//                             4 get_proc_address; 5 context
//   ggml_cgraph               int size, n_nodes, n_leafs; then at word 2 the nodes
#ifndef PALU_ADAPTERS_GGML_ABI_LAYOUT_H_
#define PALU_ADAPTERS_GGML_ABI_LAYOUT_H_

#include <array>
#include <cstddef>

namespace palu::ggml {

struct Layout {
  const char* name;      // when it came
  const char* releases;  // of ggml
  int api_version;       // GGML_BACKEND_API_VERSION

  // ggml_backend_buffer: set_tensor_2d and get_tensor_2d came in before cpy_tensor.
  int buffer_cpy, buffer_clear, buffer_buft;  // after buft: context, size, usage (int)
  // ggml_backend: graph_optimize came in at the end, the 2d pair before cpy_tensor_async.
  int backend_compute, backend_device;  // after device: context
  // ggml_backend_dev_props: device_id came in before caps, mmap_support at the end of caps (in what
  // was padding). Byte of the first of caps: async, host_buffer, buffer_from_host_ptr, events.
  int caps_byte;
  bool mmap_support;
  // What our device says it is: ACCEL, which is used only where a user asks for it by name; GPU
  // where llama.cpp's --device takes nothing else. (IGPU came in before ACCEL.)
  int device_type;
};

// clang-format off
inline constexpr std::array<Layout, 4> kLayouts = {{
    //                                 buffer:          backend:      properties:
    // name       releases       api   cpy clear buft   compute dev   caps  mmap  type
    {"2025-07", "0.0",            1,    6,   7,   9,      11,   14,    36,  false,  1},
    {"2025-09", "0.9",            2,    6,   7,   9,      11,   15,    48,  false,  3},
    {"2026-04", "0.10 to 0.16",   2,    8,   9,  11,      13,   17,    48,  false,  3},
    {"2026-08", "0.20 to 0.25",   2,    8,   9,  11,      13,   17,    48,  true,   3},
}};
// clang-format on

// The newest release of ggml that the table is known to hold for: anything later is refused.
inline constexpr int kNewestMajor = 0, kNewestMinor = 25;

// Same in all generations.
inline constexpr int kBuftDevice = 6, kBuftWords = 8;
inline constexpr int kDeviceReg = 15, kDeviceWords = 17;
inline constexpr int kRegWords = 6;

// The word of a ggml object at an offset.
inline void*& Word(void* object, int offset) { return static_cast<void**>(object)[offset]; }
inline void* Word(const void* object, int offset) {
  return static_cast<void* const*>(object)[offset];
}

}  // namespace palu::ggml

#endif  // PALU_ADAPTERS_GGML_ABI_LAYOUT_H_
