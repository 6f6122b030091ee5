// The verb `run`: a prompt, its answer, a report.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <utility>
#include <vector>

#include "files.h"
#include "generate.h"
#include "interrupt.h"
#include "measure.h"
#include "palu/palu.h"
#include "report.h"
#include "run_options.h"
#include "sizes.h"
#include "verbs.h"

namespace palu::app {
namespace {

constexpr char kFooter[] =
    "Examples:\n"
    "  palu run -m model.gguf -f book.txt -p \"Summarise.\"\n"
    "  palu run -m model.gguf -f book.txt -p \"Summarise.\" --cache palu:rank=32,hi_bit=4\n"
    "  palu run -m model.gguf -p \"Hello\" --cache llama:f16\n"
    "  palu run -m model.gguf -i\n"
    "The answer goes to standard output, everything else to standard error. `palu methods` lists "
    "caches and their options.";

// What can be refused before minutes of work.
void CheckOptions(const RunOptions& o) {
  if (o.interactive && o.raw) throw UsageError("--raw and --interactive exclude each other");
  if (o.interactive && !o.json.empty()) {
    throw UsageError("--json and --interactive exclude each other; /stats shows the figures");
  }
  if (o.interactive && o.file == "-") {
    throw UsageError("--interactive reads standard input, so --file cannot be -");
  }
  if (o.raw && !o.system.empty()) throw UsageError("--raw and --system exclude each other");
  if (!o.interactive && o.file.empty() && o.prompt.empty()) {
    throw UsageError("nothing to answer: give --file, --prompt or --interactive");
  }
  if (!o.cache.starts_with("llama:")) KVCacheConfig::Parse(o.cache);
  Sampler check_ranges(o.sampler);
  if (!o.json.empty()) CheckWritable(o.json);
}

std::vector<llama::Token> PromptTokens(const llama::Model& model, const RunOptions& o,
                                       const std::string& text) {
  const bool chat = !o.raw && model.info().has_chat_template;
  if (!chat && !o.system.empty()) {
    throw InputError("--system needs a model with a chat template; this one has none");
  }
  std::vector<llama::Token> tokens;
  if (chat) {
    std::vector<llama::ChatMessage> messages;
    if (!o.system.empty()) messages.push_back({"system", o.system});
    messages.push_back({"user", text});
    tokens = model.Tokenize(model.ApplyChatTemplate(messages, true), true, true);
  } else {
    tokens = model.Tokenize(text, true, false);
  }
  if (tokens.empty()) throw InputError("the prompt has no tokens");
  return tokens;
}

int RunOnce(const RunOptions& o) {
  const std::string text = PromptText(o);
  if (text.empty()) throw InputError("the prompt is empty");
  std::shared_ptr<const llama::Model> model = LoadModel(o);
  const std::vector<llama::Token> tokens = PromptTokens(*model, o, text);
  const int64_t reach = static_cast<int64_t>(tokens.size()) + o.tokens;
  CheckFits(*model, o, reach);
  const std::unique_ptr<llama::Session> session = OpenSession(std::move(model), o, reach);
  Sampler sampler = MakeSampler(session->model(), o);
  for (const llama::Token token : tokens) sampler.Accept(token);

  CatchInterrupt();
  const FeedResult feed = FeedPrompt(*session, tokens);
  Answer answer;
  answer.stop = Stop::kInterrupted;
  if (feed.whole) {
    answer =
        Generate(*session, sampler, {.tokens = o.tokens, .ignore_end = o.ignore_eos}, WriteOut);
  }
  if (!answer.text.empty() && !answer.text.ends_with('\n')) WriteOut("\n");

  RunReport report = ReportOf(*session, o);
  report.text = answer.text;
  report.stop = StopName(answer.stop);
  report.prompt_tokens = feed.tokens;
  report.generated_tokens = answer.tokens;
  report.prompt_tok_s = Rate(feed.tokens, feed.seconds);
  report.decode_tok_s = Rate(answer.steps, answer.seconds);
  fmt::print(stderr, "\n{}", ToText(report));
  if (!o.json.empty()) WriteJson(o.json, ToJson(report));
  return answer.stop == Stop::kInterrupted ? kInterruptedExit : 0;
}

void AddSampling(CLI::App* verb, RunOptions& o) {
  SamplerOptions& s = o.sampler;
  const char* group = "Sampling";
  verb->add_option("--temp", s.temperature, "Temperature; 0 = always the likeliest token")
      ->capture_default_str()
      ->group(group);
  verb->add_option("--top-k", s.top_k, "Draw from the k likeliest tokens; 0 = all")
      ->capture_default_str()
      ->group(group);
  verb->add_option("--top-p", s.top_p, "Draw from the fewest tokens with this probability; 1 = all")
      ->capture_default_str()
      ->group(group);
  verb->add_option("--repeat-penalty", s.repeat_penalty,
                   "Make the last 64 tokens less likely; 1 = off")
      ->capture_default_str()
      ->group(group);
  verb->add_option("--seed", s.seed, "Of the draws")->capture_default_str()->group(group);
}

}  // namespace

void AddRun(CLI::App& app, Action& action) {
  auto options = std::make_shared<RunOptions>();
  RunOptions& o = *options;
  CLI::App* verb = app.add_subcommand("run", "Answer a prompt, or chat, and report the KV cache");
  verb->footer(kFooter);
  verb->add_option("-m,--model", o.model, "GGUF file")->required()->type_name("FILE");
  verb->add_option("-f,--file", o.file, "Text to put before the prompt; - = standard input")
      ->type_name("FILE");
  verb->add_option("-p,--prompt", o.prompt, "Prompt");
  verb->add_option("-s,--system", o.system, "System message, for models with a chat template");
  verb->add_flag("-i,--interactive", o.interactive, "Chat: /help lists the commands");
  verb->add_flag("--raw", o.raw, "Continue the text as it is, without the chat template");
  verb->add_option("-c,--cache", o.cache,
                   "Cache: METHOD[:PRESET][,key=value]..., or llama:TYPE for llama.cpp's own")
      ->capture_default_str();
  verb->add_option("-n,--tokens", o.tokens, "Most tokens of an answer")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 24).description(""))
      ->type_name("N");
  verb->add_flag("--ignore-eos", o.ignore_eos, "Go on until -n tokens");
  verb->add_option("--ctx", o.context,
                   "Most positions of the run; 0 = no limit, and keys are fitted for what the "
                   "model was trained for")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 30).description(""))
      ->type_name("N");
  verb->add_option("-t,--threads", o.threads, "Threads; 0 = all cores")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024).description(""))
      ->type_name("N");
  verb->add_option_function<std::string>(
          "--kv-memory",
          [options](const std::string& text) { options->kv_memory = ParseSize(text); },
          "Limit of the KV cache, such as 200M or 1.5G")
      ->type_name("SIZE");
  verb->add_option("--json", o.json, "Write the report and the answer to this file")
      ->type_name("FILE");
  AddSampling(verb, o);
  verb->callback([options, &action] {
    action = [options] {
      CheckOptions(*options);
      return options->interactive ? Chat(*options) : RunOnce(*options);
    };
  });
}

}  // namespace palu::app
