// File: abi.cc - finds out what the running ggml is.
#include "abi.h"

#include <dlfcn.h>

#include <charconv>
#include <exception>
#include <iterator>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "abi_layout.h"
#include "abi_measure.h"
#include "abi_symbols.h"

namespace palu::ggml {
namespace {

std::string Supported() {
  return std::string("supported: ggml of llama.cpp since ") + kLayouts.front().name + ", up to " +
         std::to_string(kNewestMajor) + "." + std::to_string(kNewestMinor);
}

// Patch levels do not count. What is no version counts as newer.
bool IsNewer(std::string_view version) {
  int part[2] = {0, 0};
  const char* at = version.data();
  const char* const end = at + version.size();
  for (int& value : part) {
    const auto [next, error] = std::from_chars(at, end, value);
    if (error != std::errc()) return true;
    at = next < end && *next == '.' ? next + 1 : next;
  }
  return std::pair(part[0], part[1]) > std::pair(kNewestMajor, kNewestMinor);
}

// Numbers of ops by name. ggml_op_name does not check its argument, so the search ends at the last
// op that any release has at its end, and before it as soon as all are found.
bool FindOps(const char* (*op_name)(int), Ops* ops) {
  constexpr int kMaxOps = 256;
  const std::pair<const char*, int*> wanted[] = {
      {"NONE", &ops->none},
      {"DUP", &ops->dup},
      {"CPY", &ops->cpy},
      {"CONT", &ops->cont},
      {"RESHAPE", &ops->reshape},
      {"VIEW", &ops->view},
      {"PERMUTE", &ops->permute},
      {"TRANSPOSE", &ops->transpose},
      {"GET_ROWS", &ops->get_rows},
      {"SET_ROWS", &ops->set_rows},
      {"SCALE", &ops->scale},
      {"ROPE", &ops->rope},
      {"FLASH_ATTN_EXT", &ops->flash_attn_ext},
  };
  size_t found = 0;
  for (int op = 0; op < kMaxOps && found < std::size(wanted); ++op) {
    const std::string_view name = op_name(op);
    for (const auto& [wanted_name, number] : wanted) {
      if (name == wanted_name) *number = op, ++found;
    }
    if (name == "GLU") break;  // the last op of all known releases
  }
  return found == std::size(wanted);
}

// Fills the functions; returns the name of one that is missing, or null.
const char* FindFunctions(const Lookup& lookup, Functions* f) {
  const char* missing = nullptr;
  const auto get = [&](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(lookup(name));
    if (*function == nullptr && missing == nullptr) missing = name;
  };
  get("ggml_op_name", &f->op_name);
  get("ggml_type_size", &f->type_size);
  get("ggml_blck_size", &f->blck_size);
  get("ggml_row_size", &f->row_size);
  get("ggml_nbytes", &f->nbytes);
  get("ggml_get_type_traits", &f->type_traits);
  get("ggml_backend_buft_is_host", &f->buft_is_host);
  get("ggml_backend_dev_by_type", &f->dev_by_type);
  get("ggml_backend_dev_supports_op", &f->dev_supports_op);
  get("ggml_backend_dev_init", &f->dev_init);
  get("ggml_backend_dev_backend_reg", &f->dev_reg);
  get("ggml_backend_reg_get_proc_address", &f->reg_proc_address);
  get("ggml_backend_graph_compute", &f->graph_compute);
  get("ggml_backend_free", &f->backend_free);
  get("ggml_init", &f->init);
  get("ggml_free", &f->free);
  get("ggml_graph_overhead_custom", &f->graph_overhead_custom);
  get("ggml_new_graph_custom", &f->new_graph_custom);
  get("ggml_graph_clear", &f->graph_clear);
  get("ggml_graph_add_node", &f->graph_add_node);
  return missing;
}

// The search for symbols in the loaded ggml; empty: none is found.
Lookup FindLookup(const void* caller) {
  const std::optional<void*> handle = FindGgml(caller, "ggml_backend_dev_by_type");
  if (!handle) return nullptr;
  return [handle = *handle](const char* name) { return dlsym(handle, name); };
}

std::string CallText(const Lookup& lookup, const char* name) {
  const auto call = reinterpret_cast<const char* (*)()>(lookup(name));
  const char* text = call != nullptr ? call() : nullptr;
  return text != nullptr ? text : "";
}

std::variant<Host, std::string> Probe(const ProbeOptions& options) {
  const Lookup lookup = options.lookup ? options.lookup : FindLookup(options.caller);
  if (!lookup) {
    return "no ggml found in this process: a statically linked program exports no functions of it; "
           "use one that loads libggml as a shared library";
  }
  Host host;
  host.version = CallText(lookup, "ggml_version");
  host.commit = CallText(lookup, "ggml_commit");
  const std::string found = "ggml " + (host.version.empty() ? "(no version)" : host.version) +
                            " (" + (host.commit.empty() ? "no commit" : host.commit) + ")";
  if (host.version.empty()) return found + " is too old; " + Supported();
  if (!options.allow_newer && IsNewer(host.version)) return found + " is too new; " + Supported();
  if (const char* missing = FindFunctions(lookup, &host.functions)) {
    return found + " has no function " + missing + "; " + Supported();
  }
  if (!FindOps(host.functions.op_name, &host.ops)) {
    return found + " has no operation SET_ROWS, or others under new names; " + Supported();
  }
  const auto flag = CheckTensors(lookup, host.ops);
  if (const auto* error = std::get_if<std::string>(&flag)) {
    return found + ": " + *error + "; " + Supported();
  }
  host.compute_flag = std::get<int32_t>(flag);
  const auto measured = Measure(lookup);
  if (const auto* error = std::get_if<std::string>(&measured)) return found + ": " + *error;
  host.layout = MatchLayout(std::get<Measured>(measured));
  if (host.layout == nullptr) {
    return found + " has structs of an unknown layout (" + std::get<Measured>(measured).Text() +
           "); " + Supported();
  }
  return host;
}

}  // namespace

std::variant<Host, std::string> ProbeHost(const ProbeOptions& options) noexcept {
  try {
    return Probe(options);
  } catch (const std::exception& error) {
    return std::string(error.what());
  }
}

std::string GenerationName(const Host& host) {
  return std::string(host.layout->name) + " (ggml " + host.layout->releases + ")";
}

}  // namespace palu::ggml
