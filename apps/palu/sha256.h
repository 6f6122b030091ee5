// File: sha256.h - SHA-256 (FIPS 180-4), to tell files and texts apart.
#ifndef PALU_APPS_SHA256_H_
#define PALU_APPS_SHA256_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace palu::app {

class Sha256 {
 public:
  void Add(std::string_view bytes);
  // 64 lower-case hexadecimal digits. Ends the sum: nothing may be added afterwards.
  std::string Hex();

 private:
  void AddBlock(const uint8_t* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> pending_{};
  uint64_t length_ = 0;  // bytes added
};

std::string Sha256Of(std::string_view bytes);
// Of a whole file, read in pieces. Errors: FormatError.
std::string Sha256OfFile(const std::string& path);

}  // namespace palu::app

#endif  // PALU_APPS_SHA256_H_
