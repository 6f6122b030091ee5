// The interactive part of the verb `run`. Only what is new in the conversation is decoded.
#include <fmt/format.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/select.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "files.h"
#include "generate.h"
#include "interrupt.h"
#include "measure.h"
#include "palu/errors.h"
#include "run_options.h"

namespace palu::app {
namespace {

constexpr char kHelp[] =
    "/stats  figures of the KV cache\n"
    "/clear  forget the conversation\n"
    "/exit   leave (also the end of input, Ctrl-D)\n"
    "Ctrl-C stops an answer, a second one leaves.\n";

enum class Input { kLine, kEnd, kInterrupted };

// False when Ctrl-C came first. SIGINT is let through only while pselect waits: one that comes just
// before is not slept over.
bool WaitForInput() {
  sigset_t interrupt, before;
  sigemptyset(&interrupt);
  sigaddset(&interrupt, SIGINT);
  sigprocmask(SIG_BLOCK, &interrupt, &before);
  while (!Interrupted()) {
    fd_set input;
    FD_ZERO(&input);
    FD_SET(STDIN_FILENO, &input);
    if (pselect(STDIN_FILENO + 1, &input, nullptr, nullptr, nullptr, &before) >= 0) break;
    if (errno != EINTR) break;  // read tells what is wrong
  }
  sigprocmask(SIG_SETMASK, &before, nullptr);
  return !Interrupted();
}

// Lines of standard input. The C++ streams do not tell Ctrl-C from the end of input.
class LineReader {
 public:
  Input Next(std::string& line) {
    while (true) {
      if (const size_t end = buffer_.find('\n'); end != std::string::npos) {
        line = buffer_.substr(0, end);
        if (line.ends_with('\r')) line.pop_back();
        buffer_.erase(0, end + 1);
        return Input::kLine;
      }
      if (!WaitForInput()) return Input::kInterrupted;
      char bytes[4096];
      const ssize_t n = read(STDIN_FILENO, bytes, sizeof bytes);
      if (n > 0) {
        buffer_.append(bytes, n);
      } else if (n == 0 || errno != EINTR) {
        line = std::exchange(buffer_, {});
        return line.empty() ? Input::kEnd : Input::kLine;
      }
    }
  }

 private:
  std::string buffer_;
};

class Conversation {
 public:
  explicit Conversation(const RunOptions& options)
      : options_(options),
        model_(LoadModel(options)),
        session_(OpenSession(model_, options, 0)),
        sampler_(MakeSampler(*model_, options)) {
    Forget();
  }

  // Answers on standard output. Returns false when Ctrl-C stopped it. When an error is thrown the
  // conversation is as before.
  bool Turn(const std::string& text);
  void Forget();
  std::string Stats() const;
  bool empty() const { return fed_.empty(); }

 private:
  bool Answer();
  // Tokens that the session lacks to have decoded `whole`.
  std::vector<llama::Token> NewTokens(const std::string& whole);
  // Takes the session back to an earlier length.
  void Rewind(int64_t position);
  void DropSession();

  const RunOptions& options_;
  std::shared_ptr<const llama::Model> model_;
  std::unique_ptr<llama::Session> session_;
  Sampler sampler_;
  std::vector<llama::ChatMessage> messages_;
  std::string fed_;  // what the tokens of the session and `pending_` spell
  std::optional<llama::Token> pending_;
  bool warned_ = false;  // of a conversation longer than the model knows
  int64_t prompt_tokens_ = 0, answer_tokens_ = 0, steps_ = 0;
  double prompt_seconds_ = 0, answer_seconds_ = 0;
};

bool Conversation::Turn(const std::string& text) {
  RequireUtf8(text, "the line");
  const size_t count = messages_.size();
  const int64_t position = session_->position();
  const std::optional<llama::Token> pending = pending_;
  messages_.push_back({"user", text});
  try {
    const bool whole = Answer();
    if (messages_.size() == count + 1) {  // stopped before the answer began
      messages_.pop_back();
      Rewind(position);
    }
    return whole;
  } catch (...) {
    messages_.resize(count);
    Rewind(position);
    pending_ = fed_.empty() ? std::nullopt : pending;
    throw;
  }
}

bool Conversation::Answer() {
  const std::string whole = model_->ApplyChatTemplate(messages_, true);
  const std::vector<llama::Token> tokens = NewTokens(whole);
  const int64_t before = session_->position();
  const int64_t reach = before + static_cast<int64_t>(tokens.size());
  CheckFits(*model_, options_, reach + options_.tokens);
  if (!warned_) warned_ = WarnBeyondTraining(*model_, reach);
  const FeedResult feed = FeedPrompt(*session_, tokens);
  prompt_tokens_ += feed.tokens;
  prompt_seconds_ += feed.seconds;
  if (!feed.whole) return false;
  for (const llama::Token token : tokens) sampler_.Accept(token);
  pending_.reset();
  const app::Answer answer =
      Generate(*session_, sampler_, {.tokens = options_.tokens, .ignore_end = options_.ignore_eos},
               WriteOut);
  WriteOut("\n");
  if (answer.stop == Stop::kLimit) {
    fmt::print(stderr, "(cut after {} tokens, -n allows more)\n", answer.tokens);
  }
  answer_tokens_ += answer.tokens;
  answer_seconds_ += answer.seconds;
  steps_ += answer.steps;
  messages_.push_back({"assistant", answer.text});
  fed_ = whole + answer.text;
  pending_ = answer.pending;
  return answer.stop != Stop::kInterrupted;
}

std::vector<llama::Token> Conversation::NewTokens(const std::string& whole) {
  // A template may change earlier turns (trim them, drop reasoning): then all of it is new.
  if (fed_.empty() || !whole.starts_with(fed_)) {
    DropSession();
    return model_->Tokenize(whole, true, true);
  }
  std::vector<llama::Token> tokens;
  if (pending_) tokens.push_back(*pending_);
  const std::vector<llama::Token> rest = model_->Tokenize(whole.substr(fed_.size()), false, true);
  tokens.insert(tokens.end(), rest.begin(), rest.end());
  return tokens;
}

void Conversation::Rewind(int64_t position) {
  const int64_t extra = session_->position() - position;
  if (extra < 0 || position == 0) return DropSession();
  try {
    if (extra > 0) session_->Trim(extra);
  } catch (const Error&) {
    DropSession();  // a sliding window lacks its older tokens: the next turn decodes all anew
  }
}

void Conversation::DropSession() {
  session_->Clear();
  fed_.clear();
  pending_.reset();
}

void Conversation::Forget() {
  DropSession();
  messages_.clear();
  if (!options_.system.empty()) messages_.push_back({"system", options_.system});
}

std::string Conversation::Stats() const {
  RunReport report = ReportOf(*session_, options_);
  report.stop = fmt::format("{} messages", messages_.size());
  report.prompt_tokens = prompt_tokens_;
  report.generated_tokens = answer_tokens_;
  report.prompt_tok_s = Rate(prompt_tokens_, prompt_seconds_);
  report.decode_tok_s = Rate(steps_, answer_seconds_);
  return ToText(report);
}

void Command(Conversation& conversation, const std::string& line) {
  if (line == "/stats") {
    fmt::print(stderr, "{}", conversation.Stats());
  } else if (line == "/clear") {
    conversation.Forget();
    fmt::print(stderr, "(cleared)\n");
  } else if (line == "/help") {
    fmt::print(stderr, "{}", kHelp);
  } else {
    fmt::print(stderr, "unknown command {}; there are /stats, /clear, /help and /exit\n", line);
  }
}

// Answers, or tells why not. Returns false when Ctrl-C stopped the answer.
bool Talk(Conversation& conversation, const std::string& text) {
  bool whole = true;
  try {
    whole = conversation.Turn(text);
  } catch (const Error& e) {
    spdlog::error("{}", e.what());
  }
  ForgetInterrupt();
  return whole;
}

}  // namespace

int Chat(const RunOptions& options) {
  // A file without a prompt waits for the first line.
  std::string start = PromptText(options);
  Conversation conversation(options);
  const bool terminal = isatty(STDIN_FILENO);
  if (terminal) fmt::print(stderr, "/help lists the commands, /exit leaves.\n");
  CatchInterrupt();
  bool stopped = false;  // by Ctrl-C since the last line
  if (!options.prompt.empty()) {
    stopped = !Talk(conversation, start);
    start.clear();
  }
  LineReader reader;
  std::string line;
  while (true) {
    if (terminal) fmt::print(stderr, "> ");
    const Input input = reader.Next(line);
    if (input == Input::kInterrupted) {
      ForgetInterrupt();
      fmt::print(stderr, "\n");
      if (stopped) return kInterruptedExit;
      fmt::print(stderr, "(Ctrl-C again or /exit leaves)\n");
      stopped = true;
      continue;
    }
    stopped = false;
    if (input == Input::kEnd || line == "/exit") {
      if (terminal && input == Input::kEnd) fmt::print(stderr, "\n");
      return 0;
    }
    if (line.empty()) continue;
    if (line.starts_with('/')) {
      Command(conversation, line);
    } else {
      if (!start.empty()) line = start + "\n\n" + line;
      stopped = !Talk(conversation, line);
      if (!conversation.empty()) start.clear();  // else the file waits for the next line
    }
  }
}

}  // namespace palu::app
