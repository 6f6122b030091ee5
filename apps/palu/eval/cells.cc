// The part file is lines of JSON:
//     {"palu_eval_part": 1, "key": {...}}                         what the cells depend on
//     {"cache": ..., "chunk": ..., ..., "kl": "...", "nll": "...", "same_top": "..."}   a cell
//     {"note": NAME, "value": ...}                                a result of another check
//     {"sha256": "..."}                                           of all bytes before this line
// Floats of positions are 8 hexadecimal digits each (their bits), so that they come back exactly.
#include "eval/cells.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "eval/sha256.h"
#include "files.h"
#include "palu/errors.h"

namespace palu::app {
namespace {

using nlohmann::ordered_json;

constexpr char kFormat[] = "palu_eval_part";
constexpr int kFormatVersion = 1;

// What a user can do about a part file that cannot be used.
constexpr char kWayOut[] = "delete it or choose another --json";

std::string ToHex(const std::vector<float>& values) {
  std::string text;
  text.reserve(values.size() * 8);
  for (const float value : values) {
    fmt::format_to(std::back_inserter(text), "{:08x}", std::bit_cast<uint32_t>(value));
  }
  return text;
}

// Throws std::runtime_error when the text is something else.
std::vector<float> FromHex(const std::string& text) {
  std::vector<float> values;
  for (size_t i = 0; i < text.size(); i += 8) {
    uint32_t bits = 0;
    const char* end = text.data() + std::min(i + 8, text.size());
    if (std::from_chars(text.data() + i, end, bits, 16).ptr != end || end - text.data() < 8) {
      throw std::runtime_error("no number");
    }
    values.push_back(std::bit_cast<float>(bits));
  }
  return values;
}

ordered_json KeyJson(const EvalKey& key) {
  return {{"model", key.model},
          {"model_sha256", key.model_sha256},
          {"text_sha256", key.text_sha256},
          {"ctx", key.ctx},
          {"batch", key.batch},
          {"mode", key.mode},
          {"weights", key.weights},
          {"version", key.version}};
}

ordered_json CellJson(const std::string& cache, int64_t chunk, const Cell& cell) {
  std::string same_top;
  for (const uint8_t same : cell.same_top) same_top += same ? '1' : '0';
  return {{"cache", cache},
          {"chunk", chunk},
          {"code_bits", cell.size.code_bits},
          {"stored_bits", cell.size.stored_bits},
          {"stored_bits_at_32k", cell.size.stored_bits_at_32k},
          {"exact_tokens", cell.size.exact_tokens},
          {"kv_bytes", cell.size.kv_bytes},
          {"prompt_tokens", cell.prompt_tokens},
          {"prompt_seconds", cell.prompt_seconds},
          {"scored_tokens", cell.scored_tokens},
          {"scored_seconds", cell.scored_seconds},
          {"kl", ToHex(cell.kl)},
          {"nll", ToHex(cell.nll)},
          {"same_top", same_top}};
}

Cell CellFrom(const ordered_json& json) {
  Cell cell;
  json.at("code_bits").get_to(cell.size.code_bits);
  json.at("stored_bits").get_to(cell.size.stored_bits);
  json.at("stored_bits_at_32k").get_to(cell.size.stored_bits_at_32k);
  json.at("exact_tokens").get_to(cell.size.exact_tokens);
  json.at("kv_bytes").get_to(cell.size.kv_bytes);
  json.at("prompt_tokens").get_to(cell.prompt_tokens);
  json.at("prompt_seconds").get_to(cell.prompt_seconds);
  json.at("scored_tokens").get_to(cell.scored_tokens);
  json.at("scored_seconds").get_to(cell.scored_seconds);
  cell.kl = FromHex(json.at("kl").get<std::string>());
  cell.nll = FromHex(json.at("nll").get<std::string>());
  for (const char c : json.at("same_top").get<std::string>()) cell.same_top.push_back(c == '1');
  if (cell.kl.size() != cell.same_top.size() ||
      (!cell.kl.empty() && cell.kl.size() != cell.nll.size())) {
    throw std::runtime_error("lists of different lengths");
  }
  return cell;
}

std::string Line(const ordered_json& json) {
  return json.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

// Cuts the line with the checksum off. Throws std::runtime_error when it does not fit.
std::string_view CheckedBody(std::string_view bytes) {
  const size_t last =
      bytes.size() < 2 ? std::string_view::npos : bytes.rfind('\n', bytes.size() - 2);
  if (last == std::string_view::npos) throw std::runtime_error("too short");
  const std::string_view body = bytes.substr(0, last + 1);
  const ordered_json end = ordered_json::parse(bytes.substr(last + 1));
  if (end.at("sha256") != Sha256Of(body)) throw std::runtime_error("another checksum");
  return body;
}

// "ctx is 2048 there and 4096 here", "" when the keys are equal. A model file may have moved.
std::string Difference(const ordered_json& there, const EvalKey& key) {
  const ordered_json here = KeyJson(key);
  for (auto field = here.begin(); field != here.end(); ++field) {
    if (field.key() == "model" || there.at(field.key()) == field.value()) continue;
    return fmt::format("{} is {} there and {} here", field.key(), there.at(field.key()).dump(),
                       field->dump());
  }
  return "";
}

}  // namespace

CellStore::CellStore(std::string path, EvalKey key) : path_(std::move(path)), key_(std::move(key)) {
  if (path_.empty() || !std::filesystem::exists(path_)) return;
  try {
    Load(ReadText(path_));
  } catch (const FormatError&) {
    throw;
  } catch (const std::exception&) {  // of the JSON library, or our own while reading
    throw FormatError(
        fmt::format("{} is damaged or no part file of palu eval; {}", path_, kWayOut));
  }
}

void CellStore::Load(const std::string& bytes) {
  std::string_view body = CheckedBody(bytes);
  const auto next_line = [&] {
    const size_t end = body.find('\n');
    const ordered_json json = ordered_json::parse(body.substr(0, end));
    body.remove_prefix(end + 1);
    return json;
  };
  const ordered_json header = next_line();
  if (header.at(kFormat) != kFormatVersion) {
    throw FormatError(
        fmt::format("{} was written by another version of palu eval; {}", path_, kWayOut));
  }
  const ordered_json& key = header.at("key");
  if (const std::string difference = Difference(key, key_); !difference.empty()) {
    throw FormatError(fmt::format("{} keeps an evaluation of {} that differs from this one: {}; {}",
                                  path_, key.at("model").get<std::string>(), difference, kWayOut));
  }
  while (!body.empty()) {
    const ordered_json json = next_line();
    if (json.contains("note")) {
      notes[json.at("note").get<std::string>()] = json.at("value");
    } else {
      cells[{json.at("cache").get<std::string>(), json.at("chunk").get<int64_t>()}] =
          CellFrom(json);
    }
  }
}

void CellStore::Save() const {
  if (path_.empty()) return;
  std::string bytes = Line({{kFormat, kFormatVersion}, {"key", KeyJson(key_)}});
  for (const auto& [name, cell] : cells) bytes += Line(CellJson(name.first, name.second, cell));
  for (const auto& [name, value] : notes) bytes += Line({{"note", name}, {"value", value}});
  bytes += Line({{"sha256", Sha256Of(bytes)}});
  const std::string fresh = path_ + ".new";
  WriteFile(fresh, bytes);
  if (std::rename(fresh.c_str(), path_.c_str()) != 0) {
    throw FormatError(fmt::format("cannot replace {}: {}", path_, std::strerror(errno)));
  }
}

}  // namespace palu::app
