#include "eval/load_model.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>

#include "llama/expand.h"
#include "palu/errors.h"
#include "progress.h"
#include "run_options.h"
#include "sizes.h"

namespace palu::app {
namespace {

namespace fs = std::filesystem;

// A file of the user's temporary folder that is removed at the end.
class TempFile {
 public:
  explicit TempFile(const fs::path& folder) : path_((folder / "palu-XXXXXX.gguf").string()) {
    const int descriptor = mkstemps(path_.data(), 5);
    if (descriptor < 0) {
      throw FormatError(fmt::format("cannot write {}: {}", path_, std::strerror(errno)));
    }
    close(descriptor);
  }
  ~TempFile() {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }
  TempFile(const TempFile&) = delete;
  TempFile& operator=(const TempFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::shared_ptr<const llama::Model> Load(const EvalOptions& o, const std::string& path) {
  RunOptions run;
  run.model = path;
  run.context = o.context;
  return LoadModel(run);
}

}  // namespace

std::shared_ptr<const llama::Model> LoadEvalModel(const EvalOptions& o) {
  if (o.weights != "f32") return Load(o, o.model);
  std::error_code error;
  const fs::path folder = fs::temp_directory_path(error);
  if (error) throw FormatError("there is no folder for temporary files; TMPDIR names one");
  const int64_t needed = llama::FloatFileBytes(o.model);
  const auto free = static_cast<int64_t>(fs::space(folder).available);
  if (needed > free) {
    throw FormatError(fmt::format(
        "the weights of {} as f32 need {} in {}, which has {} left; TMPDIR names another folder",
        o.model, FormatBytes(needed), folder.string(), FormatBytes(free)));
  }
  const TempFile file(folder);
  {
    Note note("expanding the weights to f32");
    llama::ExpandToFloat(o.model, file.path(), o.threads);
  }
  return Load(o, file.path());  // maps the file, which then needs no name
}

}  // namespace palu::app
