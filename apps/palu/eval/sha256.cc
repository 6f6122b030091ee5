#include "eval/sha256.h"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <vector>

#include "palu/errors.h"

namespace palu::app {
namespace {

class Sum {
 public:
  Sum() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    Require(context_ && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr));
  }
  void Add(std::string_view bytes) {
    Require(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()));
  }
  std::string Hex() {
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned length = 0;
    Require(EVP_DigestFinal_ex(context_.get(), digest, &length));
    std::string text;
    for (unsigned i = 0; i < length; ++i) text += fmt::format("{:02x}", digest[i]);
    return text;
  }

 private:
  static void Require(bool ok) {
    if (!ok) throw StateError("OpenSSL cannot compute a SHA-256 sum here");
  }

  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

}  // namespace

std::string Sha256Of(std::string_view bytes) {
  Sum sum;
  sum.Add(bytes);
  return sum.Hex();
}

std::string Sha256OfFile(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  Sum sum;
  std::vector<char> buffer(1 << 20);
  while (file) {
    file.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    sum.Add({buffer.data(), static_cast<size_t>(file.gcount())});
  }
  if (!file.eof()) throw FormatError(fmt::format("cannot read {}: {}", path, std::strerror(errno)));
  return sum.Hex();
}

}  // namespace palu::app
