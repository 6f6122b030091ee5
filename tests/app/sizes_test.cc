#include "sizes.h"

#include <gtest/gtest.h>

#include "palu/errors.h"

namespace palu::app {
namespace {

TEST(ParseSize, ReadsPlainBytes) {
  EXPECT_EQ(ParseSize("0"), 0);
  EXPECT_EQ(ParseSize("4096"), 4096);
  EXPECT_EQ(ParseSize("512B"), 512);
}

TEST(ParseSize, SuffixesArePowersOf1024InEitherCase) {
  EXPECT_EQ(ParseSize("1K"), 1024);
  EXPECT_EQ(ParseSize("200M"), 200LL << 20);
  EXPECT_EQ(ParseSize("200m"), 200LL << 20);
  EXPECT_EQ(ParseSize("200MB"), 200LL << 20);
  EXPECT_EQ(ParseSize("200MiB"), 200LL << 20);
  EXPECT_EQ(ParseSize("1.5G"), 3LL << 29);
  EXPECT_EQ(ParseSize("2T"), 2LL << 40);
}

TEST(ParseSize, RefusesWhatIsNoSizeAndNamesIt) {
  for (const char* text : {"", "M", "-1", "-1M", "12Q", "1.2.3M", "200 M", "1Mx", "nan", "inf",
                           "1e5", "0x10", "9999999T"}) {
    try {
      ParseSize(text);
      ADD_FAILURE() << "accepted '" << text << "'";
    } catch (const ConfigError& e) {
      EXPECT_NE(std::string(e.what()).find("\"" + std::string(text) + "\""), std::string::npos)
          << e.what();
    }
  }
}

TEST(FormatBytes, PicksTheUnitThatLeavesAShortNumber) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.0 KiB");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes((1 << 20) - 1), "1.0 MiB");  // not 1024.0 KiB
  EXPECT_EQ(FormatBytes(100'000'000), "95.4 MiB");
  EXPECT_EQ(FormatBytes(5LL << 40), "5.0 TiB");
  EXPECT_EQ(FormatBytes(5000LL << 40), "5000.0 TiB");
}

}  // namespace
}  // namespace palu::app
