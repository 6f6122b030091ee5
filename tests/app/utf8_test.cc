#include "utf8.h"

#include <gtest/gtest.h>

#include <string>

namespace palu::app {
namespace {

constexpr char kReplacement[] = "\xEF\xBF\xBD";
// One, two, three and four bytes.
const std::string kText = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z";

TEST(FindInvalidUtf8, AcceptsEveryLength) {
  EXPECT_EQ(FindInvalidUtf8(""), std::string::npos);
  EXPECT_EQ(FindInvalidUtf8(kText), std::string::npos);
  EXPECT_EQ(FindInvalidUtf8(std::string("\0", 1)), std::string::npos);
  EXPECT_EQ(FindInvalidUtf8("\xF4\x8F\xBF\xBF"), std::string::npos);  // U+10FFFF
}

TEST(FindInvalidUtf8, FindsTheFirstBadByte) {
  EXPECT_EQ(FindInvalidUtf8("caf\xE9 au lait"), 3u);   // Latin-1
  EXPECT_EQ(FindInvalidUtf8("ab\x80"), 2u);            // continuation without a start
  EXPECT_EQ(FindInvalidUtf8("ab\xE2\x82"), 2u);        // cut at the end
  EXPECT_EQ(FindInvalidUtf8("\xC0\xAF"), 0u);          // over-long
  EXPECT_EQ(FindInvalidUtf8("\xE0\x9F\xBF"), 0u);      // over-long
  EXPECT_EQ(FindInvalidUtf8("\xED\xA0\x80"), 0u);      // surrogate
  EXPECT_EQ(FindInvalidUtf8("\xF4\x90\x80\x80"), 0u);  // beyond U+10FFFF
  EXPECT_EQ(FindInvalidUtf8("\xFF"), 0u);
}

TEST(Utf8Stream, AnyCutOfATextGivesTheTextBack) {
  for (size_t i = 0; i <= kText.size(); ++i) {
    for (size_t j = i; j <= kText.size(); ++j) {
      Utf8Stream stream;
      std::string out;
      for (const std::string& part :
           {kText.substr(0, i), kText.substr(i, j - i), kText.substr(j)}) {
        out += stream.Push(part);
        EXPECT_EQ(FindInvalidUtf8(out), std::string::npos);  // nothing half is ever shown
      }
      EXPECT_EQ(out, kText);
      EXPECT_EQ(stream.Finish(), "");
    }
  }
}

TEST(Utf8Stream, HoldsBackOnlyTheUnfinishedCharacter) {
  Utf8Stream stream;
  EXPECT_EQ(stream.Push("ok \xF0\x9F\x98"), "ok ");
  EXPECT_EQ(stream.Push("\x80!"), "\xF0\x9F\x98\x80!");
}

TEST(Utf8Stream, BrokenBytesBecomeReplacementCharacters) {
  Utf8Stream stream;
  EXPECT_EQ(stream.Push("a\xFF"
                        "b"),
            std::string("a") + kReplacement + "b");
  EXPECT_EQ(stream.Push("\xE2\x82"), "");
  EXPECT_EQ(stream.Push("x"), std::string(kReplacement) + "x");  // the cut one, then what came
}

TEST(Utf8Stream, FinishClosesACutCharacterOnce) {
  Utf8Stream stream;
  EXPECT_EQ(stream.Push("\xF0\x9F"), "");
  EXPECT_EQ(stream.Finish(), kReplacement);
  EXPECT_EQ(stream.Finish(), "");
  EXPECT_EQ(stream.Push("a"), "a");
}

}  // namespace
}  // namespace palu::app
