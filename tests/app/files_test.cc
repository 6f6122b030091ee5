#include "files.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "palu/errors.h"

namespace palu::app {
namespace {

namespace fs = std::filesystem;

// A fresh folder per test.
class Files : public ::testing::Test {
 protected:
  Files() {
    std::string name = (fs::temp_directory_path() / "palu_files_XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~Files() override { fs::remove_all(folder_); }

  std::string Path(const std::string& name) const { return (folder_ / name).string(); }
  void Put(const std::string& name, const std::string& bytes) const {
    std::ofstream(Path(name), std::ios::binary) << bytes;
  }
  std::string Get(const std::string& name) const {
    std::ostringstream bytes;
    bytes << std::ifstream(Path(name), std::ios::binary).rdbuf();
    return bytes.str();
  }

  fs::path folder_;
};

template <class E, class F>
std::string MessageOf(F action) {
  try {
    action();
  } catch (const E& e) {
    return e.what();
  }
  ADD_FAILURE() << "nothing thrown";
  return "";
}

TEST_F(Files, ReadTextReturnsTheBytesWithoutAByteOrderMark) {
  Put("a", "caf\xC3\xA9\n");
  Put("bom", "\xEF\xBB\xBFtext");
  Put("empty", "");
  EXPECT_EQ(ReadText(Path("a")), "caf\xC3\xA9\n");
  EXPECT_EQ(ReadText(Path("bom")), "text");
  EXPECT_EQ(ReadText(Path("empty")), "");
}

TEST_F(Files, ReadTextNamesTheFileAndTheReason) {
  const std::string missing = MessageOf<FormatError>([&] { ReadText(Path("missing")); });
  EXPECT_EQ(missing, "cannot read " + Path("missing") + ": No such file or directory");
  const std::string folder = MessageOf<FormatError>([&] { ReadText(folder_.string()); });
  EXPECT_EQ(folder, "cannot read " + folder_.string() + ": Is a directory");
}

TEST_F(Files, ReadTextSaysWhichByteIsNotUtf8) {
  Put("latin1", "caf\xE9!");
  EXPECT_EQ(MessageOf<InputError>([&] { ReadText(Path("latin1")); }),
            Path("latin1") + " is not UTF-8: byte 0xE9 at offset 3");
}

TEST_F(Files, CheckWritableChangesNothing) {
  Put("old", "content");
  CheckWritable(Path("old"));
  CheckWritable(Path("new"));
  CheckWritable("/dev/null");
  EXPECT_EQ(Get("old"), "content");
  EXPECT_FALSE(fs::exists(Path("new")));
}

TEST_F(Files, CheckWritableRefusesWhatWriteFileCannotOpen) {
  EXPECT_EQ(MessageOf<FormatError>([&] { CheckWritable(Path("no/such/folder.json")); }),
            "cannot write " + Path("no/such/folder.json") + ": No such file or directory");
  EXPECT_EQ(MessageOf<FormatError>([&] { CheckWritable(folder_.string()); }),
            "cannot write " + folder_.string() + ": Is a directory");
}

// Exits with 0 when a file without write permission is refused. Root may write everything, so it
// becomes nobody first.
[[noreturn]] void CheckWithoutPermission(const std::string& path) {
  constexpr uid_t kNobody = 65534;
  if (geteuid() == 0 && setuid(kNobody) != 0) _exit(3);
  try {
    CheckWritable(path);
  } catch (const FormatError& e) {
    _exit(std::string(e.what()) == "cannot write " + path + ": Permission denied" ? 0 : 2);
  }
  _exit(1);
}

TEST_F(Files, CheckWritableNeedsPermission) {
  Put("locked", "content");
  chmod(Path("locked").c_str(), 0444);
  chmod(folder_.c_str(), 0755);
  EXPECT_EXIT(CheckWithoutPermission(Path("locked")), ::testing::ExitedWithCode(0), "");
}

TEST_F(Files, WriteFileReplacesTheContent) {
  Put("file", "something longer than the new content");
  WriteFile(Path("file"), "new");
  EXPECT_EQ(Get("file"), "new");
}

TEST_F(Files, WriteFileReportsAFullDisk) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  EXPECT_EQ(MessageOf<FormatError>([] { WriteFile("/dev/full", "x"); }),
            "cannot write /dev/full: No space left on device");
  EXPECT_TRUE(fs::exists("/dev/full"));  // a device is not ours to remove
}

// Exits with 0 when WriteFile fails as it should. A limit on the size of files stands for a full
// disk: the write fails half way.
[[noreturn]] void WriteBeyondTheLimit(const std::string& path) {
  signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  limit.rlim_cur = limit.rlim_max = 1000;
  setrlimit(RLIMIT_FSIZE, &limit);
  try {
    WriteFile(path, std::string(5000, 'x'));
  } catch (const FormatError& e) {
    const bool named = std::string(e.what()) == "cannot write " + path + ": File too large";
    _exit(named && !fs::exists(path) ? 0 : 2);
  }
  _exit(1);
}

TEST_F(Files, WriteFileRemovesWhatItCouldNotFinish) {
  EXPECT_EXIT(WriteBeyondTheLimit(Path("partial")), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace palu::app
