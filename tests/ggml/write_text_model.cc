// Writes a random model that reads and writes text: write_text_model ARCHITECTURE PATH
#include <cstdio>
#include <exception>

#include "app/text_model.h"

int main(int argc, char** argv) try {
  if (argc != 3) {
    std::fprintf(stderr, "usage: write_text_model ARCHITECTURE PATH\n");
    return 2;
  }
  palu::app::WriteTextModel(argv[2], /*chat=*/false, /*bos=*/true, argv[1]);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
