// File: utf8.h - UTF-8 that arrives in arbitrary pieces.
//
// A token may end in the middle of a character. What goes to the terminal and to JSON is always
// well-formed (Unicode, table 3-7): incomplete characters wait, broken ones become U+FFFD.
#ifndef PALU_APPS_UTF8_H_
#define PALU_APPS_UTF8_H_

#include <string>
#include <string_view>

namespace palu::app {

// Offset of the first byte that is not part of a well-formed character; npos when there is none.
size_t FindInvalidUtf8(std::string_view text);

class Utf8Stream {
 public:
  // The characters that `bytes` completes.
  std::string Push(std::string_view bytes);
  // Ends the text: U+FFFD if a character was left incomplete. The stream is then as new.
  std::string Finish();

 private:
  std::string pending_;  // the start of one character, at most 3 bytes
};

}  // namespace palu::app

#endif  // PALU_APPS_UTF8_H_
