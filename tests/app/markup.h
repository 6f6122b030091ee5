// File: markup.h - what the tests of pages and plots ask of HTML and SVG.
#ifndef PALU_TESTS_APP_MARKUP_H_
#define PALU_TESTS_APP_MARKUP_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace palu::app {

// Every tag is closed in order and every attribute quoted, as far as a small reader can tell.
// `unclosed`: names of tags that need no end.
inline void ExpectWellFormed(const std::string& markup,
                             const std::vector<std::string>& unclosed = {}) {
  std::vector<std::string> open;
  for (size_t at = markup.find('<'); at != std::string::npos; at = markup.find('<', at + 1)) {
    const size_t end = markup.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = markup.substr(at + 1, end - at - 1);
    EXPECT_EQ(tag.find('<'), std::string::npos) << tag;
    EXPECT_EQ(std::count(tag.begin(), tag.end(), '"') % 2, 0) << tag;
    const std::string name = tag.substr(0, tag.find_first_of(" /", 1));
    if (tag.starts_with('/')) {
      ASSERT_FALSE(open.empty());
      EXPECT_EQ(open.back(), tag.substr(1));
      open.pop_back();
    } else if (!tag.ends_with('/') && std::count(unclosed.begin(), unclosed.end(), name) == 0) {
      open.push_back(name);
    }
  }
  EXPECT_TRUE(open.empty());
}

inline size_t CountOf(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace palu::app

#endif  // PALU_TESTS_APP_MARKUP_H_
