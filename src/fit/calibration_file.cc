#include "fit/calibration_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include "palu/errors.h"

namespace palu {
namespace {

constexpr char kMagic[8] = {'P', 'A', 'L', 'U', 'B', 'A', 'S', 'E'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kMostLayers = 1 << 16, kMostHeads = 1 << 16, kMostDims = 1024;
constexpr int kMostJoint = 1024;  // channels of a unit

uint64_t Fnv1a(const char* bytes, size_t n) {
  uint64_t hash = 0xcbf29ce484222325;
  for (size_t i = 0; i < n; ++i) {
    hash = (hash ^ static_cast<uint8_t>(bytes[i])) * 0x100000001b3;
  }
  return hash;
}

class Writer {
 public:
  template <class T>
  void Put(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void Put(const std::string& text) {
    Put(static_cast<uint32_t>(text.size()));
    bytes_ += text;
  }
  void PutMoments(const Moments& m, bool centred) {
    const double rows = m.rows > 0 ? m.rows : 1;
    auto mean = [&](int d) { return centred ? m.sum[d] / rows : 0.0; };
    for (int d = 0; d < m.dim; ++d) Put(static_cast<float>(mean(d)));
    for (int i = 0; i < m.dim; ++i) {
      for (int j = i; j < m.dim; ++j) {
        const double second = m.second[static_cast<size_t>(i) * m.dim + j] / rows;
        Put(static_cast<float>(second - mean(i) * mean(j)));
      }
    }
  }
  std::string& bytes() { return bytes_; }

 private:
  std::string bytes_;
};

class Reader {
 public:
  Reader(const std::string& path, const std::string& bytes, size_t end)
      : path_(path), bytes_(bytes), end_(end) {}

  [[noreturn]] void Fail(const std::string& why) const {
    throw FormatError("the basis file " + path_ + " " + why);
  }
  template <class T>
  T Get() {
    if (end_ - at_ < sizeof(T)) Fail("ends too early; write it again with `palu fit`");
    T value;
    std::memcpy(&value, bytes_.data() + at_, sizeof(value));
    at_ += sizeof(value);
    return value;
  }
  std::string GetText(uint32_t most) {
    const uint32_t n = Get<uint32_t>();
    if (n > most || end_ - at_ < n) Fail("has a name of " + std::to_string(n) + " bytes");
    at_ += n;
    return bytes_.substr(at_ - n, n);
  }
  int GetCount(const char* what, uint32_t most) {
    const uint32_t n = Get<uint32_t>();
    if (n > most) {
      Fail("has " + std::to_string(n) + " " + what + "; at most " + std::to_string(most) +
           " are possible");
    }
    return static_cast<int>(n);
  }
  Moments GetMoments(int dim, double rows) {
    Moments m(dim);
    m.rows = rows;
    for (double& x : m.sum) x = Get<float>();
    for (int i = 0; i < dim; ++i) {
      for (int j = i; j < dim; ++j) {
        const double second = (Get<float>() + m.sum[i] * m.sum[j]) * rows;
        m.second[static_cast<size_t>(i) * dim + j] = second;
        m.second[static_cast<size_t>(j) * dim + i] = second;
      }
    }
    for (double& x : m.sum) x *= rows;
    return m;
  }
  bool done() const { return at_ == end_; }

 private:
  const std::string& path_;
  const std::string& bytes_;
  size_t at_ = 0, end_;
};

LayerCalibration ReadLayer(Reader& reader) {
  LayerCalibration layer;
  layer.index = reader.GetCount("as a layer's index", kMostLayers);
  layer.heads = reader.GetCount("KV heads in a layer", kMostHeads);
  layer.dim_k = reader.GetCount("dims in a key", kMostDims);
  layer.dim_v = reader.GetCount("dims in a value", kMostDims);
  layer.window = reader.GetCount("tokens in a window", 1u << 30);
  layer.joint = reader.GetCount("joint heads", kMostHeads);
  const double tokens = reader.Get<double>();
  if (!(tokens >= 0)) reader.Fail("has a negative number of tokens");
  layer.cost_k = reader.Get<float>();
  layer.cost_v = reader.Get<float>();
  if (!(layer.cost_k >= 0 && layer.cost_v >= 0)) reader.Fail("has a negative cost");
  if (layer.joint < 1 || layer.joint * std::max(layer.dim_k, layer.dim_v) > kMostJoint) {
    reader.Fail("joins " + std::to_string(layer.joint) + " heads");
  }
  if (layer.window > 0) return layer;
  layer.DivideHeads();
  for (const HeadRange& unit : layer.units) {
    const int heads = unit.last - unit.first;
    layer.k.push_back(reader.GetMoments(heads * layer.dim_k, tokens));
    layer.v.push_back(reader.GetMoments(heads * layer.dim_v, tokens));
    for (int h = 0; h < heads; ++h) layer.q.push_back(reader.GetMoments(layer.dim_k, tokens));
  }
  return layer;
}

std::string ReadBytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes;
  if (file) bytes.assign(std::istreambuf_iterator<char>(file), {});
  if (!file || file.bad()) {
    throw FormatError("the basis file " + path + " cannot be read: " + std::strerror(errno));
  }
  return bytes;
}

}  // namespace

void LayerCalibration::DivideHeads() {
  const int most = std::min(joint, std::max(heads, 1));
  units = HeadGroups(heads, (heads + most - 1) / most);
}

Moments LayerCalibration::Of(const HeadRange& wanted, const std::vector<Moments>& side,
                             int dim) const {
  for (size_t u = 0; u < units.size(); ++u) {
    if (wanted.first < units[u].first || wanted.last > units[u].last) continue;
    return side[u].Part((wanted.first - units[u].first) * dim, (wanted.last - wanted.first) * dim);
  }
  return Moments(0);  // the builder has compared units
}

Moments LayerCalibration::Queries(const HeadRange& unit) const {
  const int n = unit.last - unit.first, width = n * dim_k;
  Moments all(width);
  all.rows = q[unit.first].rows;
  for (int h = 0; h < n; ++h) {
    const Moments& head = q[unit.first + h];
    for (int i = 0; i < dim_k; ++i) {
      for (int j = 0; j < dim_k; ++j) {
        all.second[static_cast<size_t>(h * dim_k + i) * width + h * dim_k + j] =
            head.second[static_cast<size_t>(i) * dim_k + j];
      }
    }
  }
  return all;
}

bool Calibration::has_costs() const {
  return std::all_of(layers.begin(), layers.end(), [](const LayerCalibration& layer) {
    return layer.window > 0 || (layer.cost_k > 0 && layer.cost_v > 0);
  });
}

const LayerCalibration* Calibration::Find(int index) const {
  for (const LayerCalibration& layer : layers) {
    if (layer.index == index) return &layer;
  }
  return nullptr;
}

Calibration LoadCalibration(const std::string& path) {
  const std::string bytes = ReadBytes(path);
  if (bytes.size() < sizeof(kMagic) || std::memcmp(bytes.data(), kMagic, sizeof(kMagic)) != 0) {
    throw FormatError("the file " + path + " is no basis file; `palu fit` writes one");
  }
  Reader reader(path, bytes, bytes.size() > 16 ? bytes.size() - 8 : 0);
  reader.Get<uint64_t>();  // the magic
  const uint32_t version = reader.Get<uint32_t>();
  if (version != kVersion) {
    reader.Fail("has version " + std::to_string(version) + "; this program reads version " +
                std::to_string(kVersion) + ". Write it again with `palu fit`");
  }
  uint64_t hash;
  std::memcpy(&hash, bytes.data() + bytes.size() - 8, sizeof(hash));
  if (hash != Fnv1a(bytes.data(), bytes.size() - 8)) {
    reader.Fail("is damaged or truncated; write it again with `palu fit`");
  }
  Calibration calibration;
  calibration.model = reader.GetText(4096);
  const int layers = reader.GetCount("layers", kMostLayers);
  for (int i = 0; i < layers; ++i) calibration.layers.push_back(ReadLayer(reader));
  if (!reader.done()) reader.Fail("goes on after its last layer");
  return calibration;
}

void SaveCalibration(const Calibration& calibration, const std::string& path) {
  Writer writer;
  for (const char c : kMagic) writer.Put(c);
  writer.Put(kVersion);
  writer.Put(calibration.model.substr(0, 4096));
  writer.Put(static_cast<uint32_t>(calibration.layers.size()));
  for (const LayerCalibration& layer : calibration.layers) {
    for (const int field :
         {layer.index, layer.heads, layer.dim_k, layer.dim_v, layer.window, layer.joint}) {
      writer.Put(static_cast<uint32_t>(field));
    }
    writer.Put(layer.k.empty() ? 0.0 : layer.k[0].rows);
    writer.Put(static_cast<float>(layer.cost_k));
    writer.Put(static_cast<float>(layer.cost_v));
    for (size_t u = 0; u < layer.units.size(); ++u) {
      writer.PutMoments(layer.k[u], true);
      writer.PutMoments(layer.v[u], true);
      for (int h = layer.units[u].first; h < layer.units[u].last; ++h) {
        writer.PutMoments(layer.q[h], false);
      }
    }
  }
  writer.Put(Fnv1a(writer.bytes().data(), writer.bytes().size()));

  const std::string part = path + ".part";
  std::ofstream file(part, std::ios::binary | std::ios::trunc);
  file.write(writer.bytes().data(), static_cast<std::streamsize>(writer.bytes().size()));
  file.close();
  if (!file || std::rename(part.c_str(), path.c_str()) != 0) {
    const std::string why = std::strerror(errno);
    std::remove(part.c_str());
    throw FormatError("the basis file " + path + " cannot be written: " + why);
  }
}

}  // namespace palu
