// File: text_model.h - a small random model that reads and writes text.
#ifndef PALU_TESTS_APP_TEXT_MODEL_H_
#define PALU_TESTS_APP_TEXT_MODEL_H_

#include <string>

namespace palu::app {

// A model with random weights and one token per byte: <unk>, <s>, </s>, the 256 bytes, and filler.
// Its answers are noise and mostly not UTF-8. `chat`: with a chatml template. `bos`: texts
// start with <s>. `architecture`: one of random_model.h; llama's head_dim is 32, so the default
// cache fits its basis after 256 tokens. Throws std::runtime_error.
void WriteTextModel(const std::string& path, bool chat, bool bos = true,
                    const std::string& architecture = "llama");

}  // namespace palu::app

#endif  // PALU_TESTS_APP_TEXT_MODEL_H_
