#include "npy.h"

#include <bit>
#include <cstdint>
#include <fstream>
#include <regex>
#include <string>

#include "palu/errors.h"

namespace palu::peers {
namespace {

static_assert(std::endian::native == std::endian::little, "'<' in a header means little endian");

// Magic, version 1.0, then two bytes of header length; all together a multiple of 64.
constexpr char kMagic[] = "\x93NUMPY\x01";
constexpr size_t kMagicBytes = 8;  // with the version's second half, 0
constexpr size_t kPrefixBytes = kMagicBytes + 2;

const char* NumpyName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "<f4";
    case DType::kF16:
      return "<f2";
    default:
      throw InputError(std::string("NumPy has no ") + DTypeName(dtype) +
                       "; a .npy file holds f32 or f16");
  }
}

size_t Bytes(const OwnedTensor& tensor) {
  size_t bytes = DTypeBytes(tensor.dtype);
  for (const int64_t n : tensor.shape) bytes *= static_cast<size_t>(n);
  return bytes;
}

}  // namespace

void WriteNpy(const std::filesystem::path& path, const OwnedTensor& tensor) {
  std::string shape;
  for (const int64_t n : tensor.shape) shape += std::to_string(n) + ", ";
  std::string header = std::string("{'descr': '") + NumpyName(tensor.dtype) +
                       "', 'fortran_order': False, 'shape': (" + shape + ")}";
  header.append(63 - (kPrefixBytes + header.size()) % 64, ' ').push_back('\n');
  std::ofstream file(path, std::ios::binary);
  file.write(kMagic, kMagicBytes);
  file.put(static_cast<char>(header.size() & 0xff)).put(static_cast<char>(header.size() >> 8));
  file << header;
  file.write(reinterpret_cast<const char*>(tensor.data.data()),
             static_cast<std::streamsize>(tensor.data.size()));
  file.close();
  if (!file) throw FormatError(path.string() + ": cannot be written");
}

OwnedTensor ReadNpy(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string prefix(kPrefixBytes, '\0');
  if (!file.read(prefix.data(), kPrefixBytes)) {
    throw FormatError(path.string() + ": missing, or shorter than a .npy file's header");
  }
  if (prefix.compare(0, kMagicBytes, kMagic, kMagicBytes) != 0) {
    throw FormatError(path.string() + ": not a .npy file of version 1.0");
  }
  std::string header(static_cast<uint8_t>(prefix[8]) | static_cast<uint8_t>(prefix[9]) << 8, '\0');
  file.read(header.data(), static_cast<std::streamsize>(header.size()));
  static const std::regex kHeader(
      R"(\{'descr': '<f([24])', 'fortran_order': False, 'shape': \((\d+), (\d+), (\d+), (\d+),? ?\),? ?\}\s*)");
  std::smatch match;
  if (!file || !std::regex_match(header, match, kHeader)) {
    throw FormatError(path.string() + ": header is " + header +
                      "; allowed are four dimensions of <f4 or <f2 in C order");
  }
  OwnedTensor tensor;
  tensor.dtype = match[1] == "4" ? DType::kF32 : DType::kF16;
  for (size_t i = 0; i < 4; ++i) tensor.shape[i] = std::stoll(match[i + 2]);
  tensor.data.resize(Bytes(tensor));
  if (!file.read(reinterpret_cast<char*>(tensor.data.data()),
                 static_cast<std::streamsize>(tensor.data.size()))) {
    throw FormatError(path.string() + ": truncated; the header promises " +
                      std::to_string(tensor.data.size()) + " bytes of data");
  }
  return tensor;
}

}  // namespace palu::peers
