#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <string>

#include "eval/cells.h"
#include "eval/sha256.h"
#include "palu/errors.h"
#include "program.h"

namespace palu::app {
namespace {

TEST(Sha256, EqualsThePublishedExamples) {
  EXPECT_EQ(Sha256Of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256Of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256Of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Sha256Of(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, OfAFileIsThatOfItsBytes) {
  const TempFolder folder;
  folder.Put("file", std::string(3000000, 'x'));
  EXPECT_EQ(Sha256OfFile(folder.Path("file")), Sha256Of(std::string(3000000, 'x')));
  EXPECT_THROW(Sha256OfFile(folder.Path("missing")), FormatError);
  EXPECT_THROW(Sha256OfFile(folder.Path("")), FormatError);  // a folder
}

class CellStoreTest : public ::testing::Test {
 protected:
  CellStoreTest() {
    key_.model = "model.gguf";
    key_.model_sha256 = Sha256Of("model");
    key_.text_sha256 = Sha256Of("text");
    key_.ctx = 4096;
    key_.batch = 64;
    key_.mode = "batch";
    key_.weights = "file";
    key_.version = "1";
  }

  std::string path() const { return folder_.Path("out.json.part"); }

  void SaveSome() const {
    CellStore store(path(), key_);
    Cell cell;
    cell.kl = {0, 1e-7f, 3.25f, std::numeric_limits<float>::denorm_min()};
    cell.nll = {1, 2.5f, 1 / 3.0f, 11};
    cell.same_top = {1, 0, 0, 1};
    cell.size = {4.03, 4.7, 4.1, 95, int64_t{1} << 40};
    cell.prompt_tokens = 2048;
    cell.scored_tokens = 2047;
    cell.prompt_seconds = 1.0 / 3;
    cell.scored_seconds = 2.0 / 3;
    store.cells[{"palu", 0}] = store.cells[{"palu", 3}] = cell;
    cell.kl.clear();
    cell.same_top.clear();
    store.cells[{kReferenceCell, 0}] = cell;
    store.notes["needle"] = {{"right", true}};
    store.Save();
  }

  // The message of the error that opening the file with `key` throws.
  std::string Refusal(const EvalKey& key) const {
    try {
      CellStore store(path(), key);
    } catch (const FormatError& e) {
      return e.what();
    }
    return "";
  }

  TempFolder folder_;
  EvalKey key_;
};

TEST_F(CellStoreTest, ComesBackExactly) {
  SaveSome();
  const CellStore store(path(), key_);
  ASSERT_EQ(store.cells.size(), 3u);
  const Cell& cell = store.cells.at({"palu", 3});
  EXPECT_EQ(cell.kl,
            (std::vector<float>{0, 1e-7f, 3.25f, std::numeric_limits<float>::denorm_min()}));
  EXPECT_EQ(cell.nll, (std::vector<float>{1, 2.5f, 1 / 3.0f, 11}));
  EXPECT_EQ(cell.same_top, (std::vector<uint8_t>{1, 0, 0, 1}));
  EXPECT_EQ(cell.size.code_bits, 4.03);
  EXPECT_EQ(cell.size.stored_bits, 4.7);
  EXPECT_EQ(cell.size.stored_bits_at_32k, 4.1);
  EXPECT_EQ(cell.size.exact_tokens, 95);
  EXPECT_EQ(cell.size.kv_bytes, int64_t{1} << 40);
  EXPECT_EQ(cell.prompt_tokens, 2048);
  EXPECT_EQ(cell.scored_tokens, 2047);
  EXPECT_EQ(cell.prompt_seconds, 1.0 / 3);
  EXPECT_EQ(cell.scored_seconds, 2.0 / 3);
  EXPECT_EQ(store.cells.at({kReferenceCell, 0}).nll.size(), 4u);
  EXPECT_EQ(store.notes.at("needle").at("right"), true);
}

TEST_F(CellStoreTest, WithoutAFileKeepsNothing) {
  CellStore store("", key_);
  store.cells[{"palu", 0}] = {};
  store.Save();
  EXPECT_TRUE(CellStore(path(), key_).cells.empty());
}

TEST_F(CellStoreTest, CellsOfAnotherRunAreRefusedWithTheDifference) {
  SaveSome();
  const auto expect = [&](const EvalKey& key, const std::string& part) {
    const std::string refusal = Refusal(key);
    EXPECT_NE(refusal.find(part), std::string::npos) << refusal;
    EXPECT_NE(refusal.find("delete it or choose another --json"), std::string::npos) << refusal;
    EXPECT_NE(refusal.find(path()), std::string::npos) << refusal;
  };
  EvalKey key = key_;
  key.ctx = 2048;
  expect(key, "ctx is 4096 there and 2048 here");
  key = key_;
  key.text_sha256 = Sha256Of("other");
  expect(key, "text_sha256");
  key = key_;
  key.model_sha256 = Sha256Of("other");
  expect(key, "model_sha256");
  key = key_;
  key.mode = "decode";
  expect(key, "mode is \"batch\" there and \"decode\" here");
  key = key_;
  key.version = "2";
  expect(key, "version");
  key = key_;
  key.model = "moved.gguf";
  EXPECT_EQ(Refusal(key), "");
}

TEST_F(CellStoreTest, DamagedFilesAreRefused) {
  SaveSome();
  const std::string whole = folder_.Get("out.json.part");
  std::vector<std::string> damaged = {"", "\n", "{}", "\xff\xfe garbage", "{\"a\":1}\n{\"b\":2}\n"};
  for (const size_t length : {size_t{1}, whole.size() / 2, whole.size() - 1, whole.size() - 80}) {
    damaged.push_back(whole.substr(0, length));
  }
  for (const size_t at : {size_t{40}, whole.size() / 2, whole.size() - 10}) {
    damaged.push_back(whole);
    damaged.back()[at] ^= 1;
  }
  for (const std::string& bytes : damaged) {
    folder_.Put("out.json.part", bytes);
    // Without its last line break the file is still whole.
    if (bytes == whole.substr(0, whole.size() - 1)) {
      EXPECT_EQ(Refusal(key_), "");
      continue;
    }
    EXPECT_NE(Refusal(key_).find("is damaged"), std::string::npos) << bytes.substr(0, 200);
  }
}

TEST_F(CellStoreTest, AFailedSaveLeavesTheOldFile) {
  SaveSome();
  CellStore store(path(), key_);
  store.cells.clear();
  std::filesystem::create_directory(path() + ".new");
  EXPECT_THROW(store.Save(), FormatError);
  EXPECT_EQ(CellStore(path(), key_).cells.size(), 3u);
}

}  // namespace
}  // namespace palu::app
