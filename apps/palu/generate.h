// File: generate.h - feeds tokens to a session and streams what it answers.
#ifndef PALU_APPS_GENERATE_H_
#define PALU_APPS_GENERATE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llama/session.h"
#include "sampler.h"

namespace palu::app {

struct FeedResult {
  bool whole = true;   // false: Ctrl-C stopped it on the way
  int64_t tokens = 0;  // decoded
  double seconds = 0;
};

// Decodes a prompt with a progress line. Afterwards the session has the logits of its last token.
FeedResult FeedPrompt(llama::Session& session, std::span<const llama::Token> tokens);

struct AnswerLimits {
  int64_t tokens = 256;
  bool ignore_end = false;  // go on where the model would end its turn
};

enum class Stop { kEndOfText, kLimit, kInterrupted };
const char* StopName(Stop stop);

struct Answer {
  std::string text;    // well-formed UTF-8
  int64_t tokens = 0;  // picked, without the one that ends the turn
  int64_t steps = 0;   // decoded: the last token is not
  double seconds = 0;  // of picking and decoding
  Stop stop = Stop::kLimit;
  std::optional<llama::Token> pending;  // part of the text, but not of the session yet
};

// Picks tokens from the session's logits until the model ends, the limit, or Ctrl-C. `write` gets
// whole characters as they come.
Answer Generate(llama::Session& session, Sampler& sampler, const AnswerLimits& limits,
                const std::function<void(std::string_view)>& write);

// Tokens that end the model's turn, for Sampler::Ban.
std::vector<llama::Token> EndTokens(const llama::Model& model);

}  // namespace palu::app

#endif  // PALU_APPS_GENERATE_H_
