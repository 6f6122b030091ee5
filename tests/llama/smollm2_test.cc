// The adapter on a real model: SmolLM2-135M-Instruct, whose GGUF file PALU_TEST_MODEL names.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "adapter_test_util.h"
#include "palu/errors.h"

namespace palu::llama {
namespace {

constexpr const char* kText =
    "The lighthouse stood at the end of a long spit of sand. Every evening the keeper climbed its "
    "one hundred and twelve "
    "steps, wound the clockwork that turned the lamp, and wrote the weather into a large grey "
    "book. In winter, when the "
    "sea was too rough for the supply boat, he lived on beans, smoked fish and the letters that he "
    "read again and again. "
    "One of them was from his sister, who had moved to the mountains and wrote that she missed the "
    "sound of the waves. "
    "He answered that he missed silence, and that they should change places for a year. Nobody "
    "expected her to agree.";

class SmolLm2Test : public testing::Test {
 protected:
  // One load for all tests.
  static const std::shared_ptr<const Model>& model() {
    static const std::shared_ptr<const Model> shared = Model::Load(std::getenv("PALU_TEST_MODEL"));
    return shared;
  }
  void SetUp() override {
    const char* path = std::getenv("PALU_TEST_MODEL");
    if (path == nullptr || *path == '\0') {
      GTEST_SKIP()
          << "PALU_TEST_MODEL is not set: it must name the GGUF file of SmolLM2-135M-Instruct";
    }
    ASSERT_TRUE(std::ifstream(path).good())
        << "PALU_TEST_MODEL names " << path << ", which cannot be read";
  }
  // The first 100 tokens of the text.
  static std::vector<Token> TextTokens() {
    auto tokens = model()->Tokenize(kText, true, false);
    tokens.resize(100);
    return tokens;
  }
  // Greedy continuation.
  static std::string Continue(Session& session, std::span<const Token> prompt, int n) {
    std::string text;
    session.Decode(prompt);
    for (int i = 0; i < n; ++i) {
      const std::span<const float> logits = session.Logits();
      const auto next =
          static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
      if (model()->EndsGeneration(next)) break;
      text += model()->Piece(next);
      session.Decode({&next, 1});
    }
    return text;
  }
};

TEST_F(SmolLm2Test, InfoAndShape) {
  EXPECT_EQ(model()->info().architecture, "llama");
  EXPECT_EQ(model()->info().layers, 30);
  EXPECT_EQ(model()->info().heads, 9);
  EXPECT_TRUE(model()->info().has_chat_template);
  ASSERT_EQ(model()->shape().layers.size(), 30u);
  EXPECT_EQ(model()->shape().layers[0].kv_heads, 3);
  EXPECT_EQ(model()->shape().layers[0].head_dim_k, 64);
}

TEST_F(SmolLm2Test, TokensGiveTheTextBack) {
  for (const std::string& text :
       {std::string(kText), std::string("Ünïcödé 漢字 🙂\n\tend"), std::string("")}) {
    std::string back;
    for (const Token token : model()->Tokenize(text, false, false)) back += model()->Piece(token);
    EXPECT_EQ(back, text);
  }
  for (const char* bad : {"\xff", "abc\xc3", "\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80"}) {
    EXPECT_THROW(model()->Tokenize(bad, true, false), InputError);
  }
  // With `special`, a control token is one token.
  EXPECT_EQ(model()->Tokenize("<|im_end|>", false, true).size(), 1u);
  EXPECT_GT(model()->Tokenize("<|im_end|>", false, false).size(), 1u);
  EXPECT_TRUE(model()->EndsGeneration(model()->Tokenize("<|im_end|>", false, true)[0]));
}

TEST_F(SmolLm2Test, ChatTemplateIsTheModelsOwn) {
  const std::vector<ChatMessage> chat = {{"system", "Be brief."}, {"user", "Hello"}};
  EXPECT_EQ(model()->ApplyChatTemplate(chat, true),
            "<|im_start|>system\nBe "
            "brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n");
}

// The real weights without the noise of quantized arithmetic: llama.cpp rounds activations to 8
// bits before it multiplies them with quantized weights, and then a difference in the last bit of
// one float grows to a few percent of the logits.
TEST_F(SmolLm2Test, WithWeightsInFloatFp32CacheEqualsPlainLlamaCppToItsNoiseFloor) {
  const std::string path = TempPath("smollm2_f32.gguf");
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = LLAMA_FTYPE_ALL_F32;
  params.allow_requantize = true;
  params.nthread = 2;
  ASSERT_EQ(llama_model_quantize(std::getenv("PALU_TEST_MODEL"), path.c_str(), &params), 0u);
  const auto float_model = Model::Load(path);
  const auto tokens = TextTokens();
  const int vocabulary = float_model->info().vocabulary;
  const auto expected = PlainLogits(*float_model, tokens);
  const Difference noise =
      Compare(expected, PlainLogits(*float_model, tokens, {.chunk = 1}), vocabulary);
  std::printf("llama.cpp one by one: %s\n", ToString(noise).c_str());
  for (const int chunk : {100, 37, 1}) {
    Session session(float_model, CacheOptions("fp32"));
    const Difference d = Compare(expected, SessionLogits(session, tokens, chunk), vocabulary);
    std::printf("fp32, chunk %3d: %s\n", chunk, ToString(d).c_str());
    EXPECT_LE(d.max, 3 * noise.max) << "chunk " << chunk;
    EXPECT_EQ(d.flips, 0) << "chunk " << chunk;
  }
  const Difference theirs =
      Compare(expected, PlainLogits(*float_model, tokens, {.type = GGML_TYPE_F16}), vocabulary);
  Session session(float_model, CacheOptions("fp16"));
  const Difference ours = Compare(expected, SessionLogits(session, tokens, 100), vocabulary);
  std::printf("fp16: %s; llama.cpp f16: %s\n", ToString(ours).c_str(), ToString(theirs).c_str());
  EXPECT_LE(ours.rms, 1.5 * theirs.rms);
}

// With the file as it is, the measure is how far llama.cpp's own caches are from each other.
TEST_F(SmolLm2Test, OwnCachesDifferFromPlainLlamaCppNoMoreThanItsOwnF16Cache) {
  const auto tokens = TextTokens();
  const int vocabulary = model()->info().vocabulary;
  const auto exact = PlainLogits(*model(), tokens);
  const Difference theirs =
      Compare(exact, PlainLogits(*model(), tokens, {.type = GGML_TYPE_F16}), vocabulary);
  std::printf("llama.cpp f16: %s\n", ToString(theirs).c_str());
  for (const char* cache : {"fp32", "fp16"}) {
    for (const int chunk : {100, 37}) {
      Session session(model(), CacheOptions(cache));
      const Difference ours = Compare(exact, SessionLogits(session, tokens, chunk), vocabulary);
      std::printf("%s, chunk %3d: %s\n", cache, chunk, ToString(ours).c_str());
      EXPECT_LE(ours.rms, 1.3 * theirs.rms) << cache << ", chunk " << chunk;
    }
  }
}

TEST_F(SmolLm2Test, ContinuesATextAsLlamaCppDoes) {
  const auto prompt = model()->Tokenize("The capital of France is", true, false);
  SessionOptions native_options = CacheOptions("llama:f16");
  native_options.context = 256;
  Session native(model(), native_options), own(model(), CacheOptions("fp16")),
      palu(model(), CacheOptions("palu"));
  for (Session* session : {&native, &own, &palu}) {
    EXPECT_EQ(Continue(*session, prompt, 2), " Paris.") << session->cache_text();
  }
}

}  // namespace
}  // namespace palu::llama
