// File: kv_name.h - which tensors are llama.cpp's KV cache.
#ifndef PALU_ADAPTERS_GGML_KV_NAME_H_
#define PALU_ADAPTERS_GGML_KV_NAME_H_

#include <ggml.h>

#include <optional>
#include <string_view>

namespace palu::ggml {

struct KvName {
  int layer = 0;
  bool values = false;
};

// Of "cache_k_l7" or "cache_v_l7", exactly; a tag may stand before the letter. Nodes of graphs have
// names like "cache_k_l0 (view)", and are not meant.
std::optional<KvName> ParseKvName(std::string_view name);

// "cache_r_l7", "cache_s_l7": the state of a recurrent layer.
bool IsRecurrentName(std::string_view name);

// The tensor that `t` is a view of, or itself.
inline const ggml_tensor* RootOf(const ggml_tensor* t) { return t->view_src ? t->view_src : t; }

}  // namespace palu::ggml

#endif  // PALU_ADAPTERS_GGML_KV_NAME_H_
