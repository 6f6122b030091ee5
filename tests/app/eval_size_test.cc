#include <gtest/gtest.h>

#include <vector>

#include "eval/size.h"

namespace palu::app {
namespace {

// 64 elements a token.
constexpr LayerShape kFull{.index = 0, .kv_heads = 1, .head_dim_k = 32, .head_dim_v = 32};
constexpr LayerShape kWindowed{
    .index = 1, .kv_heads = 1, .head_dim_k = 32, .head_dim_v = 32, .window = 512};

CacheStats Exact(int64_t tokens, int64_t bytes) {
  CacheStats stats;
  stats.tokens = tokens;
  stats.exact_tokens = tokens;
  stats.nbytes = bytes;
  stats.code_bits = 16;
  return stats;
}

TEST(StoredBits, OfNowAreAllBytesOverAllElements) {
  const std::vector<LayerShape> shapes = {kFull};
  EXPECT_DOUBLE_EQ(StoredBitsAt(1000, shapes, std::vector{Exact(1000, 16000)}), 2);
}

TEST(StoredBits, ThatAreNotThereYetComeAtTheWidthOfEncodedTokens) {
  CacheStats stats;
  stats.tokens = 1000;
  stats.encoded_tokens = 900;
  stats.exact_tokens = 100;
  stats.nbytes = 50000;
  stats.code_bits = 4;
  const std::vector<LayerShape> shapes = {kFull};
  const double bits = 50000.0 * 8 + 31768.0 * 64 * 4;
  EXPECT_DOUBLE_EQ(StoredBitsAt(kLongContext, shapes, std::vector{stats}), bits / (32768 * 64));
}

TEST(StoredBits, OfACacheThatIsNotFittedGrowInFp16) {
  CacheStats stats;
  stats.tokens = 100;
  stats.exact_tokens = 100;
  stats.nbytes = 100 * 128;
  EXPECT_DOUBLE_EQ(StoredBitsAt(kLongContext, std::vector{kFull}, std::vector{stats}), 16);
}

TEST(StoredBits, CountTokensOfASlidingWindowOnlyWhileTheyAreHeld) {
  // The window is full: no byte and no element more, whatever the length.
  const std::vector<LayerShape> shapes = {kWindowed};
  EXPECT_DOUBLE_EQ(StoredBitsAt(kLongContext, shapes, std::vector{Exact(2000, 512 * 128)}), 16);
  EXPECT_DOUBLE_EQ(StoredBitsAt(1 << 20, shapes, std::vector{Exact(2000, 512 * 128)}), 16);
  // It is not: it fills up.
  EXPECT_DOUBLE_EQ(StoredBitsAt(kLongContext, shapes, std::vector{Exact(100, 100 * 128)}), 16);
}

TEST(StoredBits, WeighLayersByWhatTheyHold) {
  CacheStats packed;
  packed.tokens = packed.encoded_tokens = 32768;
  packed.nbytes = 32768 * 64 * 2 / 8;
  packed.code_bits = 2;
  const double bits = 32768.0 * 64 * 2 + 512.0 * 64 * 16;
  EXPECT_DOUBLE_EQ(StoredBitsAt(kLongContext, std::vector{kFull, kWindowed},
                                std::vector{packed, Exact(32768, 512 * 128)}),
                   bits / ((32768 + 512) * 64));
}

}  // namespace
}  // namespace palu::app
