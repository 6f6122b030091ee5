// States of stock llama.cpp on the plug-in: sequences, contexts and files. Rows pass as f16.
#include <gtest/gtest.h>

#include <string>

#include "scenario_util.h"

namespace palu::ggml {
namespace {

class StateTest : public testing::TestWithParam<bool> {
 protected:
  ClientOptions Four() const { return {.cells = 1024, .sequences = 4, .unified = GetParam()}; }
};

void MoveSequence(Client& client, llama_seq_id from, llama_seq_id to, llama_state_seq_flags flags) {
  std::vector<uint8_t> bytes(llama_state_seq_get_size_ext(client.context(), from, flags));
  ASSERT_GT(bytes.size(), 0u);
  ASSERT_EQ(llama_state_seq_get_data_ext(client.context(), bytes.data(), bytes.size(), from, flags),
            bytes.size());
  ASSERT_TRUE(llama_memory_seq_rm(client.memory(), from, -1, -1));
  client.Feed(from, 50, 50);  // the cells are others' by now
  ASSERT_EQ(llama_state_seq_set_data_ext(client.context(), bytes.data(), bytes.size(), to, flags),
            bytes.size());
}

TEST_P(StateTest, OfASequenceGoesOnInAnother) {
  ExpectClose(
      Pair("llama"), Four(),
      [](Client& client) {
        client.Feed(1, 20, 20);
        client.Feed(0, 133, 100);
        MoveSequence(client, 0, 2, LLAMA_STATE_SEQ_FLAGS_NONE);
        client.Feed(2, 40, 10);
        client.Feed(1, 40, 10);
        client.Feed(0, 40, 10);
      },
      /*rounded=*/true);
}

TEST_P(StateTest, KeptOnTheDeviceGoesOn) {
  ExpectClose(
      Pair("llama"), Four(),
      [](Client& client) {
        client.Feed(0, 133, 100);
        MoveSequence(client, 0, 0, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE);
        client.Feed(0, 40, 10);
      },
      /*rounded=*/true);
}

TEST_P(StateTest, OfASequenceInAFileGoesOnInAnother) {
  ExpectClose(
      Pair("gemma3"), Four(),
      [](Client& client) {
        const std::string path = ScenarioPath("sequence.state");
        client.Feed(3, 170, 128);
        client.Feed(0, 64, 64);
        ASSERT_GT(llama_state_seq_save_file(client.context(), path.c_str(), 3, nullptr, 0), 0u);
        ASSERT_TRUE(llama_memory_seq_rm(client.memory(), 3, -1, -1));
        size_t tokens = 0;
        ASSERT_GT(llama_state_seq_load_file(client.context(), path.c_str(), 1, nullptr, 0, &tokens),
                  0u);
        client.Feed(1, 40, 10);
        client.Feed(0, 40, 10);
      },
      /*rounded=*/true);
}

TEST_P(StateTest, OfAContextInAFileGoesOnInTheNext) {
  const Pair pair("llama");
  const auto feed = [&](bool exact) {
    llama_model* const model = exact ? pair.exact.get() : pair.palu.get();
    const std::string path = ScenarioPath("context.state");
    {
      Client before(model, Four(), exact);
      before.Feed(0, 133, 100);
      before.Feed(2, 70, 70);
      EXPECT_TRUE(llama_state_save_file(before.context(), path.c_str(), nullptr, 0));
    }
    Client after(model, Four(), exact);
    size_t n = 0;
    llama_token none = 0;
    EXPECT_TRUE(llama_state_load_file(after.context(), path.c_str(), &none, 1, &n));
    after.Feed(0, 40, 10);
    after.Feed(2, 40, 10);
    return after.logits();
  };
  ExpectWithin(Compare(feed(true), feed(false), pair.random.vocabulary), BoundOf("llama", true));
}

TEST_P(StateTest, SavedLoadedAndSavedAgainIsTheSameBytes) {
  const Pair pair("llama");
  Client client(pair.palu.get(), Four(), false);
  client.Feed(0, 133, 100);
  const auto save = [&] {
    std::vector<uint8_t> bytes(llama_state_seq_get_size(client.context(), 0));
    llama_state_seq_get_data(client.context(), bytes.data(), bytes.size(), 0);
    return bytes;
  };
  const std::vector<uint8_t> first = save();
  llama_memory_clear(client.memory(), true);
  client.Feed(1, 60, 60);
  ASSERT_GT(llama_state_seq_set_data(client.context(), first.data(), first.size(), 0), 0u);
  const std::vector<uint8_t> again = save();
  EXPECT_EQ(again.size(), first.size());
  // What was packed is decoded, and packed anew.
  EXPECT_EQ(again == first, !Packs());
}

INSTANTIATE_TEST_SUITE_P(Modes, StateTest, testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Unified" : "Streams"; });

}  // namespace
}  // namespace palu::ggml
