// File: abi_local_test.cc - a plug-in in programs whose ggml does not show its names: none that is
// loaded at all (as in a static program), and one that is loaded as Python's ctypes does it.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

#include "ggml/abi.h"

namespace {

using palu::ggml::Host;
using palu::ggml::ProbeHost;

template <class F>
F* Function(void* library, const char* name) {
  return reinterpret_cast<F*>(dlsym(library, name));
}

// One test, as its steps need this order and a fresh process.
TEST(LocalGgml, IsFoundOnceItIsLoadedAndMissedBefore) {
  void* plugin = dlopen(PALU_ABI_TEST_PLUGIN, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(plugin, nullptr) << dlerror();
  EXPECT_EQ(Function<void*()>(plugin, "ggml_backend_init")(), nullptr);
  const std::string refusal = Function<const char*()>(plugin, "palu_test_error")();
  EXPECT_NE(refusal.find("no ggml found in this process"), std::string::npos) << refusal;

  void* ggml = dlopen(PALU_ABI_TEST_GGML, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(ggml, nullptr) << dlerror();
  ASSERT_EQ(dlsym(RTLD_DEFAULT, "ggml_version"), nullptr) << "ggml's names are global";
  void* reg = Function<void*(const char*)>(ggml, "ggml_backend_load")(PALU_ABI_TEST_PLUGIN);
  EXPECT_NE(reg, nullptr) << Function<const char*()>(plugin, "palu_test_error")();

  // Without a caller to go by, the list of loaded libraries is searched.
  const auto probed = ProbeHost();
  ASSERT_TRUE(std::holds_alternative<Host>(probed)) << std::get<std::string>(probed);
  EXPECT_EQ(palu::ggml::GenerationName(std::get<Host>(probed)),
            Function<const char*()>(plugin, "palu_test_generation")());
}

}  // namespace
