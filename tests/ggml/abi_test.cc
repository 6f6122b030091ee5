// File: abi_test.cc - the running ggml loads a backend made by adapters/ggml/abi.h and uses it
// through its public API; each call must arrive where it belongs, with its arguments.
//
// The program is compiled against the headers of the ggml that runs it, the plug-in against those
// of the newest one: scripts/test_generations.sh runs it so with older releases.
#include "ggml/abi.h"

#include <dlfcn.h>
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ggml/abi_cpu.h"
#include "ggml/abi_threads.h"

namespace {

using palu::ggml::Host;
using palu::ggml::ProbeHost;

// Where the plug-in is: scripts/test_generations.sh says so, else the build.
std::string PluginPath() {
  const char* path = std::getenv("PALU_ABI_TEST_PLUGIN");
  return path != nullptr ? path : PALU_ABI_TEST_PLUGIN;
}

template <class F>
F* Function(void* library, const char* name) {
  return reinterpret_cast<F*>(dlsym(library, name));
}

class AbiTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    // A build that loads its backends as libraries has no CPU backend before this.
    if (ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) == nullptr) ggml_backend_load_all();
    reg_ = ggml_backend_load(PluginPath().c_str());
    library_ = dlopen(PluginPath().c_str(), RTLD_NOLOAD | RTLD_LAZY);
  }
  void SetUp() override {
    ASSERT_NE(library_, nullptr) << PluginPath();
    ASSERT_NE(reg_, nullptr) << Function<const char*()>(library_, "palu_test_error")();
    device_ = ggml_backend_dev_by_name("PALUTEST");
    ASSERT_NE(device_, nullptr);
    buft_ = ggml_backend_dev_buffer_type(device_);
    Calls();
  }
  void TearDown() override {
    ggml_backend_buffer_free(buffer_);
    ggml_free(ctx_);
  }

  // What the plug-in was asked to do since the last time.
  static std::string Calls() { return Function<const char*()>(library_, "palu_test_calls")(); }
  static std::string Name(const char* function) {
    return Function<const char*()>(library_, function)();
  }

  // llama.cpp's --device takes accelerators since 2025-09.
  static enum ggml_backend_dev_type ExpectedType() {
    return Name("palu_test_generation").substr(0, 7) == "2025-07" ? GGML_BACKEND_DEVICE_TYPE_GPU
                                                                  : GGML_BACKEND_DEVICE_TYPE_ACCEL;
  }

  // Two tensors "a" and "b" of 4 x 3 floats in a buffer of the plug-in.
  void MakeTensors() {
    ctx_ = ggml_init({4 * ggml_tensor_overhead(), nullptr, true});
    a_ = ggml_set_name(ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, 4, 3), "a");
    b_ = ggml_set_name(ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, 4, 3), "b");
    buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(ctx_, buft_);
    ASSERT_NE(buffer_, nullptr);
  }

  static ggml_backend_reg_t reg_;
  static void* library_;
  ggml_backend_dev_t device_ = nullptr;
  ggml_backend_buffer_type_t buft_ = nullptr;
  ggml_context* ctx_ = nullptr;
  ggml_backend_buffer_t buffer_ = nullptr;
  ggml_tensor* a_ = nullptr;
  ggml_tensor* b_ = nullptr;
};
ggml_backend_reg_t AbiTest::reg_ = nullptr;
void* AbiTest::library_ = nullptr;

TEST_F(AbiTest, RegistryHasOneDeviceOfTheGivenNameThatMayBeAskedFor) {
  EXPECT_STREQ(ggml_backend_reg_name(reg_), "PALUTEST");
  ASSERT_EQ(ggml_backend_reg_dev_count(reg_), 1U);
  EXPECT_EQ(ggml_backend_reg_dev_get(reg_, 0), device_);
  EXPECT_EQ(ggml_backend_dev_backend_reg(device_), reg_);
  EXPECT_STREQ(ggml_backend_dev_name(device_), "PALUTEST");
  EXPECT_STREQ(ggml_backend_dev_description(device_), "every call written down");
  EXPECT_EQ(ggml_backend_dev_type(device_), ExpectedType());
}

TEST_F(AbiTest, LoadingItAgainGivesTheSameRegistry) {
  EXPECT_EQ(ggml_backend_load(PluginPath().c_str()), reg_);
}

// Compiled against this ggml's own struct: `caps` has the members of its generation.
template <class Props>
void CheckProps(ggml_backend_dev_t device) {
  std::array<unsigned char, sizeof(Props) + 64> room;
  room.fill(0xee);
  ggml_backend_dev_get_props(device, reinterpret_cast<ggml_backend_dev_props*>(room.data()));
  for (size_t i = sizeof(Props); i < room.size(); ++i) ASSERT_EQ(room[i], 0xee) << "byte " << i;
  const Props& props = *reinterpret_cast<Props*>(room.data());
  EXPECT_STREQ(props.name, "PALUTEST");
  EXPECT_STREQ(props.description, "every call written down");
  EXPECT_EQ(props.memory_free, size_t{1} << 30);
  EXPECT_EQ(props.memory_total, size_t{1} << 31);
  EXPECT_EQ(props.type, ggml_backend_dev_type(device));
  if constexpr (requires { props.device_id; }) {
    EXPECT_EQ(props.device_id, nullptr);
  }
  EXPECT_FALSE(props.caps.async || props.caps.host_buffer || props.caps.events);
  EXPECT_FALSE(props.caps.buffer_from_host_ptr);
  if constexpr (requires { props.caps.mmap_support; }) {
    EXPECT_TRUE(props.caps.mmap_support);
  }
}

TEST_F(AbiTest, PropertiesFillTheStructOfThisGenerationAndNoMore) {
  CheckProps<ggml_backend_dev_props>(device_);
  size_t free = 0, total = 0;
  ggml_backend_dev_memory(device_, &free, &total);
  EXPECT_EQ(free, size_t{1} << 30);
  EXPECT_EQ(total, size_t{1} << 31);
}

TEST_F(AbiTest, BufferTypeIsItsDevicesAndNoHostMemory) {
  EXPECT_STREQ(ggml_backend_buft_name(buft_), "PALUTEST");
  EXPECT_EQ(ggml_backend_buft_get_device(buft_), device_);
  EXPECT_EQ(ggml_backend_buft_get_alignment(buft_), 64U);
  EXPECT_FALSE(ggml_backend_buft_is_host(buft_));
}

TEST_F(AbiTest, DeviceWorksOnItsOwnBuffersAndOnHostMemory) {
  EXPECT_TRUE(ggml_backend_dev_supports_buft(device_, buft_));
  EXPECT_TRUE(ggml_backend_dev_supports_buft(device_, ggml_backend_cpu_buffer_type()));
}

TEST_F(AbiTest, TensorsAreInitialisedInTheBufferAndItIsFreed) {
  MakeTensors();
  const std::string calls = Calls();
  EXPECT_EQ(calls, "alloc 128\ninit a\ninit b\n");
  EXPECT_EQ(ggml_backend_buffer_get_size(buffer_), 128U);
  EXPECT_EQ(a_->data, ggml_backend_buffer_get_base(buffer_));
  EXPECT_EQ(ggml_backend_buffer_get_type(buffer_), buft_);
  EXPECT_EQ(ggml_backend_buft_get_alloc_size(buft_, a_), 48U);
  EXPECT_EQ(ggml_backend_buffer_get_usage(buffer_), GGML_BACKEND_BUFFER_USAGE_ANY);
  ggml_backend_buffer_free(std::exchange(buffer_, nullptr));
  EXPECT_EQ(Calls(), "buffer free\n");
}

TEST_F(AbiTest, RefusedAllocationIsNoBuffer) {
  EXPECT_EQ(ggml_backend_buft_alloc_buffer(buft_, 4097), nullptr);
}

// Buffers of our type that ggml makes itself: empty ones, and ones that only join others.
TEST_F(AbiTest, BufferOfGgmlsMakingIsNotTakenForOurs) {
  ggml_backend_buffer_t empty = ggml_backend_buft_alloc_buffer(buft_, 0);
  ASSERT_NE(empty, nullptr);
  EXPECT_EQ(Calls(), "");
  ggml_backend_buffer_t parts[] = {ggml_backend_buft_alloc_buffer(buft_, 64),
                                   ggml_backend_buft_alloc_buffer(buft_, 64)};
  using Join = ggml_backend_buffer_t(ggml_backend_buffer_t*, size_t);
  auto* join = Function<Join>(RTLD_DEFAULT, "ggml_backend_multi_buffer_alloc_buffer");
  ASSERT_NE(join, nullptr);
  ggml_backend_buffer_t joined = join(parts, 2);
  // SupportsOp asks whose the tensor is.
  MakeTensors();
  ggml_tensor write = *a_;
  write.op = GGML_OP_SET_ROWS;
  EXPECT_TRUE(ggml_backend_dev_supports_op(device_, &write));
  for (ggml_backend_buffer_t buffer : {empty, joined}) {
    EXPECT_EQ(ggml_backend_buffer_get_type(buffer), buft_);
    write.buffer = buffer;
    EXPECT_FALSE(ggml_backend_dev_supports_op(device_, &write));
    ggml_backend_buffer_free(buffer);
  }
}

TEST_F(AbiTest, DataGoesInAndOutWithItsOffset) {
  MakeTensors();
  Calls();
  const float in[] = {1, 2, 3};
  ggml_backend_tensor_set(b_, in, 8, sizeof in);
  float out[2] = {};
  ggml_backend_tensor_get(b_, out, 12, sizeof out);
  EXPECT_EQ(out[0], 2);
  EXPECT_EQ(out[1], 3);
  ggml_backend_tensor_memset(a_, 7, 4, 5);
  EXPECT_EQ(Calls(), "set b 8 12\nget b 12 8\nmemset a 7 4 5\n");
}

TEST_F(AbiTest, ColumnsGoInAndOutRowByRow) {
  using Set2d = void(ggml_tensor*, const void*, size_t, size_t, size_t, size_t, size_t);
  using Get2d = void(const ggml_tensor*, void*, size_t, size_t, size_t, size_t, size_t);
  auto* set = Function<Set2d>(RTLD_DEFAULT, "ggml_backend_tensor_set_2d");
  auto* get = Function<Get2d>(RTLD_DEFAULT, "ggml_backend_tensor_get_2d");
  if (set == nullptr) GTEST_SKIP() << "this ggml has no copies of columns";
  MakeTensors();
  Calls();
  const float in[] = {1, 2, 3, 4};
  set(a_, in, 4, 8, 2, 16, 8);  // two rows of two floats
  float out[4] = {};
  get(a_, out, 4, 8, 2, 16, 8);
  EXPECT_EQ(out[3], 4);
  EXPECT_EQ(Calls(), "set a 4 8\nset a 20 8\nget a 4 8\nget a 20 8\n");
}

TEST_F(AbiTest, CopiesWithinThePluginAreItsOwnAndOthersGoThroughSet) {
  MakeTensors();
  std::vector<float> values(12, 2.5F), out(12);
  ggml_backend_tensor_set(a_, values.data(), 0, 48);
  Calls();
  ggml_backend_tensor_copy(a_, b_);
  EXPECT_EQ(Calls(), "copy a b\n");
  ggml_backend_tensor_get(b_, out.data(), 0, 48);
  EXPECT_EQ(out, values);

  ggml_context* ctx = ggml_init({ggml_tensor_overhead() + 1024, nullptr, false});
  ggml_tensor* foreign = ggml_set_name(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 4, 3), "host");
  foreign->buffer = ggml_backend_cpu_buffer_from_ptr(
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(foreign->data) + 63) / 64 * 64), 64);
  Calls();
  ggml_backend_tensor_copy(foreign, b_);
  EXPECT_EQ(Calls(), "set b 0 48\n");  // ggml knows the way from host memory
  ggml_backend_buffer_free(foreign->buffer);
  ggml_free(ctx);
}

TEST_F(AbiTest, ClearReachesTheBuffer) {
  MakeTensors();
  Calls();
  ggml_backend_buffer_clear(buffer_, 3);
  EXPECT_EQ(Calls(), "clear 3\n");
  unsigned char byte = 0;
  ggml_backend_tensor_get(b_, &byte, 47, 1);
  EXPECT_EQ(byte, 3);
}

TEST_F(AbiTest, BackendKnowsItsDeviceAndTakesThreads) {
  ggml_backend_t backend = ggml_backend_dev_init(device_, nullptr);
  ASSERT_NE(backend, nullptr);
  EXPECT_STREQ(ggml_backend_name(backend), "PALUTEST");
  EXPECT_EQ(ggml_backend_get_device(backend), device_);
  EXPECT_EQ(ggml_backend_get_default_buffer_type(backend), buft_);
  EXPECT_NE(ggml_backend_guid(backend), nullptr);
  ggml_backend_synchronize(backend);
  auto set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
      ggml_backend_reg_get_proc_address(reg_, "ggml_backend_set_n_threads"));
  ASSERT_NE(set_threads, nullptr);
  set_threads(backend, 5);
  EXPECT_EQ(ggml_backend_reg_get_proc_address(reg_, "ggml_backend_split_buffer_type"), nullptr);
  ggml_backend_free(backend);
  EXPECT_EQ(Calls(), "threads 5\nbackend free\n");
}

// A cache of 4 cells in a buffer of the plug-in; a graph that writes two rows into it, attends over
// it, and doubles the result on the CPU.
class GraphTest : public AbiTest {
 protected:
  void SetUp() override {
    AbiTest::SetUp();
    if (HasFatalFailure()) return;
    ours_ = ggml_backend_dev_init(device_, nullptr);
    cpu_ = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    ctx_ = ggml_init({2 * ggml_tensor_overhead(), nullptr, true});
    cache_ = ggml_set_name(ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, kWidth, 4), "cache");
    buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(ctx_, buft_);
    ggml_backend_buffer_clear(buffer_, 0);
    ggml_backend_t backends[] = {ours_, cpu_};
    sched_ = ggml_backend_sched_new(backends, nullptr, 2, 64, false, false);
    graph_ctx_ = ggml_init({64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true});
    BuildGraph();
  }
  void TearDown() override {
    ggml_backend_sched_free(sched_);
    ggml_backend_free(ours_);
    ggml_backend_free(cpu_);
    ggml_free(graph_ctx_);
    AbiTest::TearDown();
  }
  void BuildGraph() {
    ggml_context* ctx = graph_ctx_;
    rows_ = Input(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, kWidth, 2), "rows");
    places_ = Input(ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 2), "places");
    query_ = Input(ggml_new_tensor_4d(ctx, GGML_TYPE_F32, kWidth, 1, 1, 1), "query");
    write_ = ggml_set_name(ggml_set_rows(ctx, cache_, rows_, places_), "write");
    ggml_tensor* attend = ggml_set_name(
        ggml_flash_attn_ext(ctx, query_, cache_, cache_, nullptr, 0.5F, 0, 0), "attend");
    result_ = ggml_set_name(ggml_scale(ctx, attend, 2), "result");
    ggml_set_output(result_);
    graph_ = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph_, write_);
    ggml_build_forward_expand(graph_, result_);
  }
  static ggml_tensor* Input(ggml_tensor* tensor, const char* name) {
    ggml_set_input(tensor);
    return ggml_set_name(tensor, name);
  }
  std::vector<float> Compute() {
    EXPECT_TRUE(ggml_backend_sched_alloc_graph(sched_, graph_));
    const std::vector<float> rows(2 * kWidth, 3), query(kWidth, 1);
    const int64_t places[] = {3, 1};
    ggml_backend_tensor_set(rows_, rows.data(), 0, ggml_nbytes(rows_));
    ggml_backend_tensor_set(places_, places, 0, sizeof places);
    ggml_backend_tensor_set(query_, query.data(), 0, ggml_nbytes(query_));
    Calls();
    EXPECT_EQ(ggml_backend_sched_graph_compute(sched_, graph_), GGML_STATUS_SUCCESS);
    calls_ = Calls();
    std::vector<float> result(kWidth);
    ggml_backend_tensor_get(result_, result.data(), 0, ggml_nbytes(result_));
    return result;
  }

  static constexpr int kWidth = 32;
  ggml_backend_t ours_ = nullptr, cpu_ = nullptr;
  ggml_backend_sched_t sched_ = nullptr;
  ggml_context* graph_ctx_ = nullptr;
  ggml_tensor *cache_ = nullptr, *rows_ = nullptr, *places_ = nullptr, *query_ = nullptr;
  ggml_tensor *write_ = nullptr, *result_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
  std::string calls_;
};

TEST_F(GraphTest, SchedulerGivesThePluginItsOperationsAndTheRestToTheCpu) {
  // Two cells of 3, scale 0.5, doubled.
  EXPECT_EQ(Compute(), std::vector<float>(kWidth, 6));
  EXPECT_NE(calls_.find("set_rows write\nflash_attn_ext attend\n"), std::string::npos) << calls_;
  float cell[kWidth];
  ggml_backend_tensor_get(cache_, cell, 3 * sizeof cell, sizeof cell);
  EXPECT_EQ(cell[kWidth - 1], 3);
}

TEST_F(GraphTest, NodesThatAreNotToBeComputedAreLeftOut) {
  const int flag = Function<int()>(library_, "palu_test_compute_flag")();
  EXPECT_EQ(flag, write_->flags & 16);  // as this ggml marks the nodes of a graph
  if (flag == 0) GTEST_SKIP() << "this ggml computes all nodes of a graph";
  write_->flags &= ~flag;
  EXPECT_EQ(Compute(), std::vector<float>(kWidth, 0));
  EXPECT_EQ(calls_.find("set_rows"), std::string::npos) << calls_;
  EXPECT_NE(calls_.find("flash_attn_ext attend\n"), std::string::npos) << calls_;
}

// ---- in this program

TEST_F(AbiTest, CpuRunnerComputesASingleNode) {
  const auto probed = ProbeHost();
  ASSERT_TRUE(std::holds_alternative<Host>(probed)) << std::get<std::string>(probed);
  auto cpu = palu::ggml::CpuRunner::Make(std::get<Host>(probed));
  ASSERT_NE(cpu, nullptr);
  cpu->SetThreads(2);
  ggml_context* ctx = ggml_init({1 << 16, nullptr, false});
  ggml_tensor* in = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 8);
  std::fill_n(static_cast<float*>(in->data), 8, 1.5F);
  ggml_tensor* out = ggml_scale(ctx, in, 4);
  EXPECT_TRUE(cpu->Supports(out));
  for (int run = 0; run < 3; ++run) {
    static_cast<float*>(out->data)[7] = 0;
    EXPECT_EQ(cpu->Compute(out), GGML_STATUS_SUCCESS);
    EXPECT_EQ(static_cast<float*>(out->data)[7], 6);
  }
  ggml_free(ctx);
}

// The functions of the running ggml, some of them replaced.
std::string Refusal(const std::map<std::string, void*>& replaced, bool allow_newer = false) {
  palu::ggml::ProbeOptions options;
  options.allow_newer = allow_newer;
  options.lookup = [&replaced](const char* name) {
    const auto found = replaced.find(name);
    return found != replaced.end() ? found->second : dlsym(RTLD_DEFAULT, name);
  };
  const auto probed = ProbeHost(options);
  const auto* error = std::get_if<std::string>(&probed);
  return error != nullptr ? *error : "";
}
template <class F>
void* Address(F* function) {
  return reinterpret_cast<void*>(function);
}

class ProbeTest : public AbiTest {};

TEST_F(ProbeTest, RegistrationServesOneGgmlOfTheProcess) {
  Host host = std::get<Host>(ProbeHost());
  ggml_backend_reg* first = palu::ggml::MakeRegistration(host, nullptr);
  EXPECT_NE(first, nullptr);
  EXPECT_EQ(palu::ggml::MakeRegistration(host, nullptr), first);
  host.functions.op_name = +[](int) { return "another's"; };
  EXPECT_EQ(palu::ggml::MakeRegistration(host, nullptr), nullptr);
}

TEST_F(ProbeTest, FindsTheRunningGgml) {
  const auto probed = ProbeHost();
  ASSERT_TRUE(std::holds_alternative<Host>(probed)) << std::get<std::string>(probed);
  const Host& host = std::get<Host>(probed);
  const char* expected = std::getenv("PALU_ABI_TEST_GENERATION");
  if (expected != nullptr) {
    EXPECT_EQ(palu::ggml::GenerationName(host).substr(0, 7), expected);
  }
  EXPECT_EQ(palu::ggml::GenerationName(host), Name("palu_test_generation"));
  EXPECT_EQ(host.ops.none, GGML_OP_NONE);
  EXPECT_EQ(host.ops.set_rows, GGML_OP_SET_ROWS);
  EXPECT_EQ(host.ops.flash_attn_ext, GGML_OP_FLASH_ATTN_EXT);
  EXPECT_EQ(host.ops.rope, GGML_OP_ROPE);
  EXPECT_EQ(host.ops.cpy, GGML_OP_CPY);
  EXPECT_EQ(host.functions.row_size(GGML_TYPE_Q8_0, 64), ggml_row_size(GGML_TYPE_Q8_0, 64));
}

TEST_F(ProbeTest, NewerGgmlIsRefusedUnlessAllowed) {
  const auto newer = +[]() -> const char* { return "0.26.0"; };
  const std::string refusal = Refusal({{"ggml_version", Address(newer)}});
  EXPECT_NE(refusal.find("0.26.0"), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("too new; supported: ggml of llama.cpp since 2025-07"), std::string::npos);
  EXPECT_EQ(refusal.find('\n'), std::string::npos);
  EXPECT_EQ(Refusal({{"ggml_version", Address(newer)}}, true), "");
  const auto patch = +[]() -> const char* { return "0.25.99-dev"; };
  EXPECT_EQ(Refusal({{"ggml_version", Address(patch)}}), "");
  const auto odd = +[]() -> const char* { return "next"; };
  EXPECT_NE(Refusal({{"ggml_version", Address(odd)}}).find("too new"), std::string::npos);
}

TEST_F(ProbeTest, GgmlWithoutAVersionIsTooOld) {
  const std::string refusal = Refusal({{"ggml_version", nullptr}});
  EXPECT_NE(refusal.find("(no version)"), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("too old"), std::string::npos) << refusal;
}

TEST_F(ProbeTest, MissingFunctionIsNamed) {
  for (const char* name : {"ggml_op_name", "ggml_nbytes", "ggml_backend_buft_alloc_buffer",
                           "ggml_backend_dev_get_props", "ggml_graph_nodes"}) {
    EXPECT_NE(Refusal({{name, nullptr}}).find(name), std::string::npos) << name;
  }
}

TEST_F(ProbeTest, GgmlWithoutSetRowsIsRefused) {
  const auto names = +[](int op) -> const char* {
    const char* name = ggml_op_name(static_cast<ggml_op>(op));
    return std::string(name) == "SET_ROWS" ? "ROWS" : name;
  };
  const std::string refusal = Refusal({{"ggml_op_name", Address(names)}});
  EXPECT_NE(refusal.find("no operation SET_ROWS"), std::string::npos) << refusal;
}

TEST_F(ProbeTest, GgmlWithoutACpuBackendSaysToLoadItFirst) {
  const auto none = +[](int) -> ggml_backend_dev_t { return nullptr; };
  const std::string refusal = Refusal({{"ggml_backend_dev_by_type", Address(none)}});
  EXPECT_NE(refusal.find("load it first"), std::string::npos) << refusal;
}

// Objects of a layout that no release has, even when the version is a known one.
TEST_F(ProbeTest, UnknownLayoutIsRefusedWhateverTheVersion) {
  static void* words[20];
  words[12] = ggml_backend_cpu_buffer_type();  // one function more than any release has
  const auto alloc = +[](ggml_backend_buffer_type_t, size_t) {
    return reinterpret_cast<ggml_backend_buffer_t>(words);
  };
  const auto keep = +[](ggml_backend_buffer_t) {};
  const std::string refusal = Refusal({{"ggml_backend_buft_alloc_buffer", Address(alloc)},
                                       {"ggml_backend_buffer_free", Address(keep)}},
                                      true);
  EXPECT_NE(refusal.find("unknown layout"), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("buffer 12"), std::string::npos) << refusal;
}

TEST_F(ProbeTest, UnknownApiVersionIsRefused) {
  static int reg[32] = {6};
  const auto reg_of = +[](ggml_backend_dev_t) { return reinterpret_cast<ggml_backend_reg_t>(reg); };
  const auto proc = +[](ggml_backend_reg_t, const char*) -> void* { return nullptr; };
  const std::string refusal = Refusal({{"ggml_backend_dev_backend_reg", Address(reg_of)},
                                       {"ggml_backend_reg_get_proc_address", Address(proc)}});
  EXPECT_NE(refusal.find("API 6"), std::string::npos) << refusal;
}

TEST_F(ProbeTest, TensorsOfAnotherLayoutAreRefused) {
  const auto make = +[](ggml_context* ctx, ggml_type, int64_t a, int64_t b, int64_t c, int64_t d) {
    return ggml_new_tensor_4d(ctx, GGML_TYPE_F32, a, b, c, d);
  };
  const std::string refusal = Refusal({{"ggml_new_tensor_4d", Address(make)}});
  EXPECT_NE(refusal.find("fields of ggml_tensor"), std::string::npos) << refusal;
}

// ---- threads

bool Has(const std::vector<std::string>& all, const std::string& name) {
  return std::find(all.begin(), all.end(), name) != all.end();
}

TEST(Threads, LibrariesThatAnObjectNeedsAreRead) {
  EXPECT_TRUE(Has(palu::ggml::NeededLibraries(Address(Has)), "libc.so.6"));
  const int on_the_stack = 0;
  EXPECT_TRUE(palu::ggml::NeededLibraries(&on_the_stack).empty());
}

TEST_F(ProbeTest, ThreadsAreSharedWithAnObjectOfTheSameOpenMp) {
  const auto probed = ProbeHost();
  ASSERT_TRUE(std::holds_alternative<Host>(probed));
  Host host = std::get<Host>(probed);
  const auto& f = host.functions;
  const void* const cpu = f.reg_proc_address(f.dev_reg(f.dev_by_type(palu::ggml::kCpuDevice)),
                                             "ggml_backend_set_n_threads");
  ASSERT_NE(cpu, nullptr);
  const bool has_openmp = Has(palu::ggml::NeededLibraries(cpu), "libgomp.so.1");
  EXPECT_EQ(palu::ggml::SharesThreads(host, cpu), has_openmp);
  // The loader needs nothing at all.
  EXPECT_FALSE(palu::ggml::SharesThreads(host, dlsym(RTLD_DEFAULT, "_r_debug")));
  host.functions.dev_by_type = [](int) -> ggml_backend_device* { return nullptr; };
  EXPECT_TRUE(palu::ggml::SharesThreads(host, cpu));
}

}  // namespace
