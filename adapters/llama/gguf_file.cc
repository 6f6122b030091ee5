#include "llama/gguf_file.h"

#include <gguf.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>

#include "llama/log.h"
#include "palu/errors.h"

namespace palu::llama {
namespace {

using GgufPtr = std::unique_ptr<gguf_context, decltype(&gguf_free)>;

// A key's unsigned value, whatever integer type it is stored in; `fallback` when it is absent or
// something else.
int64_t ReadInteger(const gguf_context* gguf, const std::string& key, int64_t fallback) {
  const int64_t id = gguf_find_key(gguf, key.c_str());
  if (id < 0) return fallback;
  switch (gguf_get_kv_type(gguf, id)) {
    case GGUF_TYPE_UINT32:
      return gguf_get_val_u32(gguf, id);
    case GGUF_TYPE_INT32:
      return gguf_get_val_i32(gguf, id);
    case GGUF_TYPE_UINT64:
      return static_cast<int64_t>(gguf_get_val_u64(gguf, id));
    default:
      return fallback;
  }
}

std::string ReadString(const gguf_context* gguf, const char* key) {
  const int64_t id = gguf_find_key(gguf, key);
  if (id < 0 || gguf_get_kv_type(gguf, id) != GGUF_TYPE_STRING) return "";
  return gguf_get_val_str(gguf, id);
}

void CheckMagic(const std::string& path, int64_t file_bytes) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw FormatError("cannot open " + path + ": " + std::strerror(errno));
  char magic[4] = {};
  if (!file.read(magic, sizeof magic)) {
    throw FormatError(path + " is not a GGUF file: it has only " + std::to_string(file_bytes) +
                      " bytes");
  }
  if (std::memcmp(magic, GGUF_MAGIC, sizeof magic) != 0) {
    throw FormatError(path + " is not a GGUF file: it does not start with \"GGUF\"");
  }
}

// Bytes that the file must have for all tensors in its header.
int64_t NeededBytes(const gguf_context* gguf) {
  size_t end = 0;
  for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
    end = std::max(end, gguf_get_tensor_offset(gguf, i) + gguf_get_tensor_size(gguf, i));
  }
  return static_cast<int64_t>(gguf_get_data_offset(gguf) + end);
}

}  // namespace

GgufFacts CheckGgufFile(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) throw FormatError("cannot open " + path + ": no such file");
  if (fs::is_directory(status)) throw FormatError(path + " is a directory, not a GGUF file");
  GgufFacts facts;
  const auto size = fs::file_size(path, error);
  if (error) throw FormatError("cannot read " + path + ": " + error.message());
  facts.file_bytes = static_cast<int64_t>(size);
  CheckMagic(path, facts.file_bytes);

  const ErrorLog log;
  const GgufPtr gguf(gguf_init_from_file(path.c_str(), {.no_alloc = true, .ctx = nullptr}),
                     gguf_free);
  if (!gguf) throw FormatError(path + " has a damaged or truncated GGUF header" + log.suffix());
  const int64_t needed = NeededBytes(gguf.get());
  if (facts.file_bytes < needed) {
    throw FormatError(path + " is truncated: its tensors need " + std::to_string(needed) +
                      " bytes, it has " + std::to_string(facts.file_bytes));
  }
  facts.architecture = ReadString(gguf.get(), "general.architecture");
  if (facts.architecture.empty())
    throw FormatError(path + " names no architecture: it is no language model");
  const std::string& arch = facts.architecture;
  facts.original_context = ReadInteger(gguf.get(), arch + ".rope.scaling.original_context_length",
                                       ReadInteger(gguf.get(), arch + ".context_length", 0));
  facts.cached_layers =
      std::max<int64_t>(0, ReadInteger(gguf.get(), arch + ".block_count", 0) -
                               ReadInteger(gguf.get(), arch + ".attention.shared_kv_layers", 0) -
                               ReadInteger(gguf.get(), arch + ".nextn_predict_layers", 0));
  facts.long_rope = gguf_find_tensor(gguf.get(), "rope_factors_long.weight") >= 0;
  return facts;
}

}  // namespace palu::llama
