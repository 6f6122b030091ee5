#include "generate.h"

#include "interrupt.h"
#include "measure.h"
#include "progress.h"
#include "utf8.h"

namespace palu::app {

FeedResult FeedPrompt(llama::Session& session, std::span<const llama::Token> tokens) {
  const int64_t before = session.position();
  const auto total = static_cast<int64_t>(tokens.size());
  const InterruptReply reply("\nstopping after this batch; Ctrl-C again ends at once\n");
  Progress progress("prompt", total);
  Timer timer;
  FeedResult result;
  result.whole = session.Decode(tokens, llama::LogitRows::kLast, [&](int64_t done) {
    progress.Update(done);
    // All done is done: the last logits are there.
    return done == total || !Interrupted();
  });
  result.seconds = timer.Seconds();
  result.tokens = session.position() - before;
  return result;
}

const char* StopName(Stop stop) {
  switch (stop) {
    case Stop::kEndOfText:
      return "end of text";
    case Stop::kLimit:
      return "limit";
    case Stop::kInterrupted:
      return "interrupted";
  }
  return "";
}

Answer Generate(llama::Session& session, Sampler& sampler, const AnswerLimits& limits,
                const std::function<void(std::string_view)>& write) {
  const llama::Model& model = session.model();
  Answer answer;
  Utf8Stream characters;
  const auto emit = [&](const std::string& text) {
    if (text.empty()) return;
    answer.text += text;
    write(text);
  };
  Timer timer;
  while (true) {
    answer.stop = Interrupted() ? Stop::kInterrupted : Stop::kLimit;
    if (Interrupted() || answer.tokens >= limits.tokens) break;
    if (answer.pending) {
      session.Decode(std::span(&*answer.pending, 1));
      answer.pending.reset();
      ++answer.steps;
    }
    const llama::Token token = sampler.Sample(session.Logits());
    if (!limits.ignore_end && model.EndsGeneration(token)) {
      answer.stop = Stop::kEndOfText;
      break;
    }
    sampler.Accept(token);
    answer.pending = token;
    ++answer.tokens;
    emit(characters.Push(model.Piece(token)));
  }
  answer.seconds = timer.Seconds();
  emit(characters.Finish());
  return answer;
}

std::vector<llama::Token> EndTokens(const llama::Model& model) {
  std::vector<llama::Token> tokens;
  for (llama::Token token = 0; token < model.info().vocabulary; ++token) {
    if (model.EndsGeneration(token)) tokens.push_back(token);
  }
  return tokens;
}

}  // namespace palu::app
