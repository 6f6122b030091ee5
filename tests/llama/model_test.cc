// Loading: what a model looks like, and what is refused and why.
#include "llama/model.h"

#include <ggml.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>

#include "adapter_test_util.h"
#include "ggml/rope.h"
#include "llama/context.h"
#include "llama/graph.h"
#include "llama/model_impl.h"
#include "palu/errors.h"

namespace palu::llama {
namespace {

// The message of the FormatError that `call` throws; fails the test when it throws nothing or
// something else.
std::string FormatErrorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const FormatError& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "not a FormatError: " << error.what();
    return "";
  }
  ADD_FAILURE() << "no error";
  return "";
}

std::vector<int> Windows(const Model& model) {
  std::vector<int> windows;
  for (const LayerShape& layer : model.shape().layers) windows.push_back(layer.window);
  return windows;
}

TEST(ModelShapeTest, HasHeadsAndDimsOfEveryLayer) {
  const RandomModel random = MakeRandomModel("llama");
  const auto model = LoadRandom(random);
  ASSERT_EQ(model->shape().layers.size(), static_cast<size_t>(random.layers));
  for (int i = 0; i < random.layers; ++i) {
    const LayerShape& layer = model->shape().layers[i];
    EXPECT_EQ(layer.index, i);
    EXPECT_EQ(layer.kv_heads, random.kv_heads);
    EXPECT_EQ(layer.head_dim_k, random.head_dim);
    EXPECT_EQ(layer.head_dim_v, random.head_dim);
    EXPECT_EQ(layer.window, 0);
  }
  EXPECT_EQ(model->shape().context, random.train_context);
  const ModelInfo& info = model->info();
  EXPECT_EQ(info.architecture, "llama");
  EXPECT_EQ(info.name, "random llama");
  EXPECT_EQ(info.layers, random.layers);
  EXPECT_EQ(info.heads, random.heads);
  EXPECT_EQ(info.vocabulary, random.vocabulary);
  EXPECT_EQ(info.train_context, random.train_context);
  EXPECT_EQ(info.file_bytes, static_cast<int64_t>(std::filesystem::file_size(info.path)));
  EXPECT_FALSE(info.has_chat_template);
}

TEST(ModelWindowTest, ProbeFindsWhichLayersHaveAWindow) {
  EXPECT_EQ(Windows(*LoadRandom(MakeRandomModel("llama"))), (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(Windows(*LoadRandom(MakeRandomModel("gemma2"))), (std::vector<int>{50, 0, 50, 0}));
  EXPECT_EQ(Windows(*LoadRandom(MakeRandomModel("gemma3"))),
            (std::vector<int>{100, 100, 100, 100, 100, 0}));
  EXPECT_EQ(Windows(*LoadRandom(MakeRandomModel("gpt-oss"))), (std::vector<int>{40, 0, 40, 0}));
}

TEST(ModelShapeTest, LayersMayDifferAndShareTheirKeysAndValues) {
  const RandomModel random = MakeRandomModel("gemma4");
  const auto model = LoadRandom(random);
  EXPECT_EQ(model->info().layers, 6);
  EXPECT_EQ(Windows(*model),
            (std::vector<int>{60, 60, 60, 0}));  // the last two layers use those of layers 2 and 3
  for (const LayerShape& layer : model->shape().layers) {
    EXPECT_EQ(layer.head_dim_k, layer.window > 0 ? random.head_dim / 2 : random.head_dim);
  }
  std::vector<int> attends;
  for (const LayerInfo& layer : model->impl().layers) attends.push_back(layer.attends);
  EXPECT_EQ(attends, (std::vector<int>{1, 1, 2, 2}));
}

TEST(ModelWindowTest, ProbeWorksForWindowsOfAnyLength) {
  for (const int window : {3, 4, 9, 64, 4096, 100000}) {
    RandomModel random = MakeRandomModel("gemma2");
    random.window = window;
    EXPECT_EQ(Windows(*LoadRandom(random)), (std::vector<int>{window, 0, window, 0}));
  }
}

TEST(ModelRefusalTest, RecurrentModels) {
  const std::string message = FormatErrorOf([] { LoadRandom(MakeRandomModel("mamba")); });
  EXPECT_NE(message.find("recurrent"), std::string::npos) << message;
}

TEST(ModelRefusalTest, AlibiBias) {
  const std::string message = FormatErrorOf([] { LoadRandom(MakeRandomModel("refact")); });
  EXPECT_NE(message.find("ALiBi"), std::string::npos) << message;
}

TEST(ModelRefusalTest, LatentAttention) {
  const std::string message = FormatErrorOf([] { LoadRandom(MakeRandomModel("deepseek2")); });
  EXPECT_NE(message.find("latent attention"), std::string::npos) << message;
}

TEST(ModelRefusalTest, UnknownArchitecture) {
  RandomModel random = MakeRandomModel("llama");
  random.architecture = "no-such-architecture";
  const std::string message = FormatErrorOf([&] { LoadRandom(random); });
  EXPECT_NE(message.find("no-such-architecture"), std::string::npos) << message;
}

class ModelFileTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = TempPath("file.gguf");
    WriteRandomModel(MakeRandomModel("llama"), path_);
  }
  // The error of loading the first `bytes` of the file.
  std::string ErrorOfFirst(int64_t bytes) {
    const std::string cut = TempPath("cut.gguf");
    std::filesystem::copy_file(path_, cut, std::filesystem::copy_options::overwrite_existing);
    std::filesystem::resize_file(cut, bytes);
    const std::string message = FormatErrorOf([&] { Model::Load(cut); });
    EXPECT_NE(message.find(cut), std::string::npos) << message;
    return message;
  }
  std::string path_;
};

TEST_F(ModelFileTest, MissingFileIsNamed) {
  const std::string message = FormatErrorOf([] { Model::Load("/no/such/model.gguf"); });
  EXPECT_NE(message.find("/no/such/model.gguf"), std::string::npos) << message;
  EXPECT_NE(message.find("no such file"), std::string::npos) << message;
}

TEST_F(ModelFileTest, DirectoryIsRefused) {
  EXPECT_NE(FormatErrorOf([] { Model::Load("/"); }).find("directory"), std::string::npos);
}

TEST_F(ModelFileTest, ForeignFileIsRefused) {
  const std::string text = TempPath("text.gguf");
  std::ofstream(text) << "This is a text, not a model.\n";
  EXPECT_NE(FormatErrorOf([&] { Model::Load(text); }).find("not a GGUF file"), std::string::npos);
  const std::string empty = TempPath("empty.gguf");
  std::ofstream(empty).flush();
  EXPECT_NE(FormatErrorOf([&] { Model::Load(empty); }).find("0 bytes"), std::string::npos);
}

TEST_F(ModelFileTest, TruncatedFileIsRefusedWhereverItIsCut) {
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path_));
  EXPECT_NE(ErrorOfFirst(size - 1).find("truncated"), std::string::npos);
  EXPECT_NE(ErrorOfFirst(size / 2).find("truncated"), std::string::npos);
  for (const int64_t bytes : {4, 12, 24, 100, 300, 1000}) {
    EXPECT_NE(ErrorOfFirst(bytes).find("header"), std::string::npos) << bytes;
  }
}

TEST_F(ModelFileTest, NegativeContextIsRefused) {
  EXPECT_THROW(Model::Load(path_, {.context = -1}), ConfigError);
}

TEST(ModelTextTest, ModelsWithoutATokenizerSaySo) {
  const auto model = LoadRandom(MakeRandomModel("llama"));
  EXPECT_THROW(model->Tokenize("text", true, false), InputError);
  EXPECT_EQ(model->Piece(3), "");
  EXPECT_THROW(model->Piece(-1), InputError);
  EXPECT_THROW(model->Piece(model->info().vocabulary), InputError);
  EXPECT_FALSE(model->EndsGeneration(3));
  const std::vector<ChatMessage> chat = {{"user", "Hello"}};
  EXPECT_EQ(model->ApplyChatTemplate(chat, true),
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n");
}

// Turns the rotation of RopeParams back at `position`.
void Unrotate(const RopeParams& rope, double position, float* row) {
  const size_t planes = rope.inv_freq.size();
  for (size_t i = 0; i < planes; ++i) {
    const bool interleaved = rope.pairing == RopePairing::kInterleaved;
    float& x = row[interleaved ? 2 * i : i];
    float& y = row[interleaved ? 2 * i + 1 : i + planes];
    const double angle = position * rope.inv_freq[i], c = std::cos(angle), s = std::sin(angle);
    const double x0 = c * x + s * y, y0 = c * y - s * x;
    x = static_cast<float>(x0);
    y = static_cast<float>(y0);
  }
}

// Compares, in a running graph, what goes into the ROPE node of K with the un-rotated rows that
// come out for the cache.
struct RopeCheck {
  const Model::Impl* model;
  int64_t position = 0;
  double worst = 0;
  int rotated = 0, plain = 0;
  std::map<const ggml_tensor*, std::vector<float>> seen = {};  // inputs of ROPE nodes

  // Stops after every node, so that a ROPE node is asked about when its input is there and not yet
  // overwritten.
  static bool Callback(ggml_tensor* t, bool ask, void* self) {
    RopeCheck& check = *static_cast<RopeCheck*>(self);
    if (ask && t->op == GGML_OP_ROPE) check.seen[t] = Dense(t->src[0]);
    if (!ask && Classify(t).kind == NodeKind::kKeys) check.OnKeys(t);
    return true;
  }
  static std::vector<float> Dense(const ggml_tensor* t) {  // [tokens][heads][dim]
    std::vector<float> out;
    for (int64_t token = 0; token < t->ne[2]; ++token) {
      for (int64_t head = 0; head < t->ne[1]; ++head) {
        const auto* row = reinterpret_cast<const float*>(static_cast<const char*>(t->data) +
                                                         token * t->nb[2] + head * t->nb[1]);
        out.insert(out.end(), row, row + t->ne[0]);
      }
    }
    return out;
  }
  void OnKeys(const ggml_tensor* t) {
    const int index = Classify(t).layer;
    const LayerInfo& layer = model->layers.at(index);
    ASSERT_TRUE(layer.rope.has_value());
    const ggml_tensor* node =
        ggml::FindRope(t, [](int op) { return ggml_op_name(static_cast<ggml_op>(op)); });
    if (node == nullptr) {
      EXPECT_TRUE(layer.rope->inv_freq.empty());
      ++plain;
      return;
    }
    ++rotated;
    const std::vector<float>& before = seen.at(node);
    const ConstTensor rows = RowsView(t->src[0], layer.shape.kv_heads, layer.shape.head_dim_k);
    std::vector<float> row(layer.shape.head_dim_k);
    for (int64_t token = 0; token < rows.shape[2]; ++token) {
      for (int head = 0; head < layer.shape.kv_heads; ++head) {
        std::memcpy(
            row.data(),
            static_cast<const float*>(rows.data) + head * rows.stride[1] + token * rows.stride[2],
            row.size() * sizeof(float));
        for (size_t i = 0; i < 2 * layer.rope->inv_freq.size(); ++i)
          row[i] /= ggml::RopeMagnitude(node);
        Unrotate(*layer.rope, static_cast<double>(position + token), row.data());
        const float* expected = before.data() + (token * layer.shape.kv_heads + head) * row.size();
        for (size_t i = 0; i < row.size(); ++i)
          worst = std::max(worst, std::abs(double{row[i]} - expected[i]));
      }
    }
  }
};

struct RopeCase {
  const char* name;
  RandomModel random;
  int64_t context;
  int plain_layers;
};

TEST(ModelRopeTest, UnrotatingCachedKeysGivesTheInputOfTheRopeNode) {
  RandomModel yarn = MakeRandomModel("llama");
  yarn.yarn_factor = 4;
  RandomModel yarn_halves = MakeRandomModel("qwen2");
  yarn_halves.yarn_factor = 8;
  const RandomModel phi = MakeRandomModel("phi3");
  const std::vector<RopeCase> cases = {{"llama", MakeRandomModel("llama"), 0, 0},
                                       {"qwen3", MakeRandomModel("qwen3"), 0, 0},
                                       {"gemma3", MakeRandomModel("gemma3"), 0, 0},
                                       {"qwen2vl", MakeRandomModel("qwen2vl"), 0, 0},
                                       {"gemma4", MakeRandomModel("gemma4"), 0, 0},
                                       {"yarn", yarn, 0, 0},
                                       {"yarn_halves", yarn_halves, 0, 0},
                                       {"long_rope_short", phi, 400, 0},
                                       {"long_rope_long", phi, 2000, 0},
                                       {"smollm3", MakeRandomModel("smollm3"), 0, 1}};
  for (const RopeCase& c : cases) {
    const auto model = LoadRandom(c.random, c.context);
    RopeCheck check{.model = &model->impl(), .position = 500};
    Context context(
        model->handle(),
        {.cells = 256, .ubatch = 16, .callback = RopeCheck::Callback, .callback_data = &check});
    const auto tokens = RandomTokens(16, c.random.vocabulary);
    ASSERT_EQ(context.Decode(tokens, check.position, LogitRows::kLast), 0);
    EXPECT_EQ(check.plain, c.plain_layers) << c.name;
    EXPECT_EQ(check.rotated + check.plain, static_cast<int>(model->shape().layers.size()))
        << c.name;
    // Keys are of size 1; ggml's angles have float rounding times the position.
    EXPECT_LT(check.worst, 2e-3) << c.name;
    EXPECT_GT(check.worst, 0) << c.name;
  }
}

TEST(ModelRopeTest, LongAndShortFactorsGiveOtherFrequencies) {
  const RandomModel random = MakeRandomModel("phi3");
  const auto long_model = LoadRandom(random, 2000), short_model = LoadRandom(random, 400);
  EXPECT_NE(long_model->impl().layers[0].rope->inv_freq,
            short_model->impl().layers[0].rope->inv_freq);
}

}  // namespace
}  // namespace palu::llama
