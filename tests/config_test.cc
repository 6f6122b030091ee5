// The text form of a config, its checks and their messages; the method table.
#include <gtest/gtest.h>

#include "test_util.h"

namespace palu {
namespace {

using namespace test;

std::string ParseError(const std::string& text) {
  return MessageOf<ConfigError>([&] { KVCacheConfig::Parse(text); });
}

// ---- parsing ----

TEST(ConfigParse, MethodAloneHasTheDefaults) {
  EXPECT_EQ(KVCacheConfig::Parse("palu"), KVCacheConfig());
  const KVCacheConfig c = KVCacheConfig::Parse("palu");
  EXPECT_EQ(c.bit_plan, BitPlan::kAuto);
  EXPECT_EQ(c.key_fit, KeyFit::kAveraged);
  EXPECT_EQ(c.sink_tokens, 4);
  EXPECT_EQ(c.recent_tokens, 64);
  EXPECT_EQ(c.windowed_bits, 8);
  EXPECT_FALSE(c.rank.has_value());
}

TEST(ConfigParse, OnlyPaluPacksWindows) {
  for (const std::string text : {"palu", "palu:small", "palu:quality", "palu:basis=a.basis"}) {
    EXPECT_TRUE(KVCacheConfig::Parse(text).EncodesWindows()) << text;
    EXPECT_FALSE(
        KVCacheConfig::Parse(text == "palu" ? "palu:windowed_bits=16" : text + ",windowed_bits=16")
            .EncodesWindows());
  }
  EXPECT_TRUE(KVCacheConfig::Parse("palu:reference,windowed_bits=8").EncodesWindows());
  EXPECT_FALSE(KVCacheConfig::Parse("palu:reference").EncodesWindows());
  EXPECT_FALSE(KVCacheConfig::Parse("palu:only=3k").EncodesWindows());  // costs of full layers
  for (const MethodInfo& method : ListMethods()) {
    EXPECT_EQ(KVCacheConfig::Parse(method.name).EncodesWindows(), method.name == "palu");
    EXPECT_EQ(KVCacheConfig::Parse(method.name).windowed_bits, method.name == "palu" ? 8 : 16);
  }
}

TEST(ConfigParse, EveryOptionReachesItsField) {
  const KVCacheConfig c = KVCacheConfig::Parse(
      "palu:rank=32,energy_threshold=0.95,energy_rule=squares,rank_policy=per_group,n_head_groups="
      "3,"
      "key_fit=prompt,fit_tokens=600,quantize_values=false,bits=mixed,hi_bit=6,lo_bit=3,hi_"
      "fraction=0.5,"
      "scales=minmax,group_size=64,sink_tokens=8,recent_tokens=128,windowed_bits=16,max_bytes="
      "1000000");
  EXPECT_EQ(c.rank, 32);
  EXPECT_EQ(c.energy_threshold, 0.95);
  EXPECT_EQ(c.energy_rule, EnergyRule::kSquares);
  EXPECT_EQ(c.rank_policy, RankPolicy::kPerGroup);
  EXPECT_EQ(c.n_head_groups, 3);
  EXPECT_EQ(c.key_fit, KeyFit::kPrompt);
  EXPECT_EQ(c.fit_tokens, 600);
  EXPECT_FALSE(c.quantize_values);
  EXPECT_EQ(c.bit_plan, BitPlan::kMixed);
  EXPECT_EQ(c.hi_bit, 6);
  EXPECT_EQ(c.lo_bit, 3);
  EXPECT_EQ(c.hi_fraction, 0.5);
  EXPECT_EQ(c.scales, ScaleFormat::kMinMax);
  EXPECT_EQ(c.group_size, 64);
  EXPECT_EQ(c.sink_tokens, 8);
  EXPECT_EQ(c.recent_tokens, 128);
  EXPECT_EQ(c.windowed_bits, 16);
  EXPECT_EQ(c.max_bytes, 1000000);
}

TEST(ConfigParse, ReferencePreset) {
  const KVCacheConfig c = KVCacheConfig::Parse("palu:reference");
  EXPECT_FALSE(c.rank.has_value());
  EXPECT_EQ(c.energy_threshold, 0.90);
  EXPECT_EQ(c.energy_rule, EnergyRule::kSum);
  EXPECT_EQ(c.rank_policy, RankPolicy::kMin);
  EXPECT_EQ(c.n_head_groups, 4);
  EXPECT_EQ(c.key_fit, KeyFit::kPrompt);
  EXPECT_EQ(c.fit_tokens, 0);
  EXPECT_EQ(c.bit_plan, BitPlan::kMixed);
  EXPECT_EQ(c.hi_bit, 4);
  EXPECT_EQ(c.lo_bit, 2);
  EXPECT_EQ(c.hi_fraction, 0.25);
  EXPECT_EQ(c.scales, ScaleFormat::kMinMax);
  EXPECT_EQ(c.group_size, 32);
  EXPECT_EQ(c.sink_tokens, 0);
  EXPECT_EQ(c.recent_tokens, 0);
  EXPECT_EQ(c.windowed_bits, 16);
  EXPECT_TRUE(c.quantize_values);
}

TEST(ConfigParse, OptionsAfterAPresetChangeIt) {
  const KVCacheConfig c = KVCacheConfig::Parse("palu:reference,rank=32,sink_tokens=2");
  EXPECT_EQ(c.rank, 32);
  EXPECT_EQ(c.sink_tokens, 2);
  EXPECT_EQ(c.fit_tokens, 0);
}

TEST(ConfigParse, MixedBitOptionsSelectMixedBits) {
  for (const std::string option : {"hi_bit=6", "lo_bit=3", "hi_fraction=0.5", "rank=32,hi_bit=4"}) {
    EXPECT_EQ(KVCacheConfig::Parse("palu:" + option).bit_plan, BitPlan::kMixed) << option;
  }
  EXPECT_EQ(KVCacheConfig::Parse("palu:rank=32").bit_plan, BitPlan::kAuto);
  EXPECT_EQ(KVCacheConfig::Parse("palu:bits=auto:2.25").auto_bits, 2.25);
}

TEST(ConfigParse, MaxBytesTakesSuffixes) {
  EXPECT_EQ(KVCacheConfig::Parse("fp16:max_bytes=123").max_bytes, 123);
  EXPECT_EQ(KVCacheConfig::Parse("fp16:max_bytes=3K").max_bytes, 3 << 10);
  EXPECT_EQ(KVCacheConfig::Parse("fp16:max_bytes=200M").max_bytes, 200 << 20);
  EXPECT_EQ(KVCacheConfig::Parse("fp16:max_bytes=1.5G").max_bytes, int64_t{3} << 29);
}

TEST(ConfigParse, ToStringReadsBackToAnEqualConfig) {
  for (const std::string text : {"fp16",
                                 "palu",
                                 "palu:reference",
                                 "palu:reference,rank=32",
                                 "palu:rank=32,hi_bit=4",
                                 "palu:bits=auto:2.5",
                                 "palu:bits=auto:0.3",
                                 "palu:bits=mixed",
                                 "palu:reference,bits=auto:3",
                                 "palu:fit_tokens=0",
                                 "palu:energy_threshold=0.1,energy_rule=squares",
                                 "palu:rank_policy=max",
                                 "palu:rank_policy=per_group",
                                 "palu:quantize_values=false",
                                 "palu:hi_fraction=0.3333333333333333,lo_bit=1",
                                 "palu:scales=minmax",
                                 "palu:group_size=128,sink_tokens=0,recent_tokens=0",
                                 "palu:max_bytes=1.5G",
                                 "fp16:max_bytes=200M",
                                 "palu:n_head_groups=1000000",
                                 "fp16:max_bytes=9007199254740993",
                                 "palu:hi_bit=8,lo_bit=8,hi_fraction=1",
                                 "palu:key_fit=prompt",
                                 "palu:key_mean=fixed",
                                 "palu:reference,key_fit=averaged",
                                 "palu:reference,key_fit=averaged,key_mean=rotated",
                                 "palu:basis=a.basis",
                                 "palu:basis=a.basis,key_metric=plain,budgets=equal",
                                 "palu:small",
                                 "palu:quality,joint_heads=2,key_extra=-0.5",
                                 "palu:only=3v",
                                 "palu:windowed_bits=16",
                                 "palu:reference,windowed_bits=8",
                                 "palu:basis=none,bits=3",
                                 "palu:basis=hadamard",
                                 "kivi:bits=4,recent_tokens=64",
                                 "svdq:rank=48",
                                 "svdq:bits=2",
                                 "rabitq:bits=2,fit_tokens=100",
                                 "uniform:group_size=64",
                                 "q8_0/q4_0:recent_tokens=64,sink_tokens=4",
                                 "palu:reference,energy_threshold=1"}) {
    const KVCacheConfig config = KVCacheConfig::Parse(text);
    const std::string written = config.ToString();
    EXPECT_EQ(KVCacheConfig::Parse(written), config) << text << " -> " << written;
    EXPECT_EQ(KVCacheConfig::Parse(written).ToString(), written);
  }
}

TEST(ConfigParse, ToStringReadsBackForRandomOptions) {
  Random random(1);
  const auto pick = [&](const std::vector<std::string>& all) {
    return all[static_cast<size_t>(random.Between(0, static_cast<int64_t>(all.size()) - 1))];
  };
  for (int round = 0; round < 300; ++round) {
    std::string text = "palu:fit_tokens=" + std::to_string(random.Between(-1, 5000));
    const std::vector<std::string> all = {
        "rank=" + std::to_string(random.Between(1, 1024)),
        "energy_threshold=" + std::to_string(random.Uniform() * 0.9 + 0.05),
        "energy_rule=" + pick({"sum", "squares"}),
        "rank_policy=" + pick({"min", "max", "per_group"}),
        "n_head_groups=" + std::to_string(random.Between(1, 64)),
        "key_fit=" + pick({"prompt", "averaged"}),
        "quantize_values=" + pick({"true", "false"}),
        pick({"bits=mixed", "bits=auto:2.5", "hi_bit=7,lo_bit=1",
              "hi_fraction=" + std::to_string(random.Uniform())}),
        "scales=" + pick({"log8", "minmax"}),
        "group_size=" + pick({"8", "16", "32", "64", "128"}),
        "sink_tokens=" + std::to_string(random.Between(0, 4096)),
        "recent_tokens=" + std::to_string(random.Between(0, 65536)),
        "windowed_bits=" + pick({"8", "16"}),
        "max_bytes=" + std::to_string(random.Between(0, int64_t{1} << 40))};
    for (const std::string& option : all) {
      if (random.Uniform() < 0.5) text += "," + option;
    }
    const KVCacheConfig config = KVCacheConfig::Parse(text);
    ASSERT_EQ(KVCacheConfig::Parse(config.ToString()), config)
        << text << " -> " << config.ToString();
  }
}

// ---- errors ----

struct BadOption {
  std::string option, value;
  std::vector<std::string> allowed;  // what the message has to say
};

class ConfigRange : public testing::TestWithParam<BadOption> {};

TEST_P(ConfigRange, MessageNamesOptionValueAndRange) {
  const BadOption& bad = GetParam();
  const std::string message = ParseError("palu:" + bad.option + "=" + bad.value);
  ExpectSays(message, {bad.option});
  if (!bad.value.empty()) ExpectSays(message, {bad.value});
  ExpectSays(message, bad.allowed);
}

INSTANTIATE_TEST_SUITE_P(
    EachOption, ConfigRange,
    testing::Values(
        BadOption{"rank", "0", {"1", "head_dim"}}, BadOption{"rank", "-3", {"1"}},
        BadOption{"rank", "many", {"none"}}, BadOption{"rank", "3.5", {"whole"}},
        BadOption{"energy_threshold", "0", {"above 0", "1"}},
        BadOption{"energy_threshold", "1.01", {"1"}}, BadOption{"energy_threshold", "nan", {"1"}},
        BadOption{"energy_threshold", "0.9x", {"1"}},
        BadOption{"energy_rule", "cubes", {"sum", "squares"}},
        BadOption{"rank_policy", "mean", {"min", "max", "per_group"}},
        BadOption{"n_head_groups", "0", {"1"}}, BadOption{"n_head_groups", "-1", {"1"}},
        BadOption{"key_fit", "later", {"prompt", "averaged"}},
        BadOption{"fit_tokens", "-2", {"-1"}}, BadOption{"fit_tokens", "99999999999", {"-1"}},
        BadOption{"quantize_values", "perhaps", {"true", "false"}},
        BadOption{"bits", "three", {"mixed", "auto:"}}, BadOption{"bits", "0", {"1", "8"}},
        BadOption{"bits", "9", {"1", "8"}}, BadOption{"bits", "2.5", {"whole"}},

        BadOption{"basis", "", {"fit", "none"}}, BadOption{"key_metric", "queries", {"basis=FILE"}},
        BadOption{"bits", "auto:0", {"8"}}, BadOption{"bits", "auto:9", {"8"}},
        BadOption{"bits", "auto:", {"auto:"}}, BadOption{"bits", "auto:nan", {"8"}},
        BadOption{"hi_bit", "9", {"1", "8"}}, BadOption{"hi_bit", "0", {"1", "8"}},
        BadOption{"lo_bit", "0", {"1", "8"}}, BadOption{"lo_bit", "-1", {"1", "8"}},
        BadOption{"hi_fraction", "-0.1", {"0", "1"}}, BadOption{"hi_fraction", "1.5", {"0", "1"}},
        BadOption{"hi_fraction", "nan", {"0", "1"}},
        BadOption{"scales", "log4", {"minmax", "log8"}},
        BadOption{"group_size", "31", {"8", "16", "32", "64", "128"}},
        BadOption{"group_size", "256", {"8", "16", "32", "64", "128"}},
        BadOption{"sink_tokens", "-1", {"0", "4096"}}, BadOption{"sink_tokens", "4097", {"4096"}},
        BadOption{"recent_tokens", "-1", {"0", "65536"}},
        BadOption{"recent_tokens", "65537", {"65536"}},
        BadOption{"windowed_bits", "4", {"8 or 16"}}, BadOption{"windowed_bits", "", {"8 or 16"}},
        BadOption{"max_bytes", "-1", {"0"}}, BadOption{"max_bytes", "2T", {"M", "G"}},
        BadOption{"max_bytes", "lots", {"M", "G"}}, BadOption{"rank", "", {"1"}}));

TEST(ConfigErrors, UnknownNamesListWhatExists) {
  ExpectSays(ParseError("pula"), {"pula", "palu", "fp16"});
  ExpectSays(ParseError(""), {"palu", "fp16"});
  ExpectSays(ParseError("palu:bitz=3"), {"bitz", "bits", "hi_bit", "group_size"});
  ExpectSays(ParseError("palu:original"), {"original", "reference"});
  ExpectSays(ParseError("fp16:reference"), {"reference", "fp16"});
}

TEST(ConfigErrors, MalformedTexts) {
  for (const std::string text :
       {"palu:", "palu:,", "palu:rank=3,", "palu:=3", "palu:rank", "palu:rank=3,reference",
        "palu:rank=3,,hi_bit=4", " palu", "palu ", "palu:rank = 3", "palu:rank=3;hi_bit=4"}) {
    ParseError(text);
  }
}

TEST(ConfigErrors, Contradictions) {
  ExpectSays(ParseError("palu:hi_bit=2,lo_bit=4"), {"hi_bit", "lo_bit", "2", "4"});
  ExpectSays(ParseError("palu:lo_bit=5"), {"hi_bit", "lo_bit", "5", "4"});
  ExpectSays(ParseError("palu:bits=auto:3,hi_bit=4"), {"hi_bit", "mixed", "auto:3"});
}

TEST(ConfigErrors, OptionsOfOtherMethods) {
  ExpectSays(ParseError("kivi:rank=8"), {"rank", "kivi", "bits", "recent_tokens"});
  ExpectSays(ParseError("kivi:bits=auto:3"), {"auto:3", "kivi", "1 to 8"});
  ExpectSays(ParseError("uniform:bits=mixed"), {"mixed", "uniform", "1 to 8"});
  ExpectSays(ParseError("rabitq:bits=5"), {"5", "rabitq", "1 to 4"});
  ExpectSays(ParseError("fp16:bits=4"), {"bits", "fp16", "max_bytes"});
  ExpectSays(ParseError("kivi:windowed_bits=8"), {"windowed_bits", "kivi", "recent_tokens"});
  ExpectSays(ParseError("palu:basis=none,rank=8"), {"rank", "basis=none"});
}

TEST(ConfigErrors, FieldsSetByHandAreCheckedToo) {
  KVCacheConfig c;
  c.group_size = 48;
  ExpectSays(MessageOf<ConfigError>([&] { c.Validate(); }), {"group_size", "48", "128"});
  c = KVCacheConfig();
  c.method = "nothing";
  ExpectSays(MessageOf<ConfigError>([&] { c.Validate(); }), {"nothing", "palu"});
  c = KVCacheConfig();
  c.hi_fraction = std::nan("");
  c.bit_plan = BitPlan::kMixed;
  ExpectSays(MessageOf<ConfigError>([&] { c.Validate(); }), {"hi_fraction"});
  // The builder checks as well.
  c = KVCacheConfig();
  c.sink_tokens = -5;
  ExpectSays(
      MessageOf<ConfigError>([&] { KVCacheBuilder::ForModel(ModelShape::Uniform(2, 2, 64), c); }),
      {"sink_tokens", "-5"});
}

TEST(ConfigErrors, RankBeyondHeadDim) {
  const KVCacheConfig c = KVCacheConfig::Parse("palu:rank=80");
  EXPECT_NO_THROW(c.ValidateFor(80));
  ExpectSays(MessageOf<ConfigError>([&] { c.ValidateFor(64); }), {"rank", "80", "64"});
  ExpectSays(
      MessageOf<ConfigError>([&] { KVCacheBuilder::ForModel(ModelShape::Uniform(1, 2, 64), c); }),
      {"rank", "80", "64"});
  // Also when only the values are too narrow.
  ExpectSays(
      MessageOf<ConfigError>([&] { KVCacheBuilder::ForModel(OneLayer(2, 128, {.dim_v = 64}), c); }),
      {"rank", "80", "64"});
}

TEST(ConfigErrors, ShapesThatNoLayerHas) {
  const auto error = [](const ModelShape& shape) {
    return MessageOf<InputError>(
        [&] { KVCacheBuilder::ForModel(shape, KVCacheConfig::Parse("fp16")); });
  };
  ExpectSays(error(OneLayer(0, 64)), {"0"});
  ExpectSays(error(OneLayer(2, 0)), {"0", "1024"});
  ExpectSays(error(OneLayer(2, 1025)), {"1025", "1024"});
  ExpectSays(error(OneLayer(2, 64, {.window = -1})), {"window", "-1"});
  ExpectSays(error(OneLayer(2, 64, {.batch = 0})), {"batch", "0"});
  ExpectSays(error(ModelShape{}), {"layer"});
}

// ---- listings ----

TEST(ConfigListings, EveryOptionIsDescribed) {
  const std::string text = DescribeOptions();
  ExpectSays(text,
             {"rank", "energy_threshold", "energy_rule", "rank_policy", "n_head_groups", "key_fit",
              "fit_tokens", "quantize_values", "bits", "hi_bit", "lo_bit", "hi_fraction", "scales",
              "group_size", "sink_tokens", "recent_tokens", "windowed_bits", "max_bytes", "basis"});
}

TEST(ConfigListings, MethodsAndPresetsParse) {
  bool reference = false;
  for (const MethodInfo& method : ListMethods()) {
    EXPECT_EQ(KVCacheConfig::Parse(method.name).method, method.name);
    for (const std::string& preset : method.presets) {
      EXPECT_NE(KVCacheConfig::Parse(method.name + ":" + preset),
                KVCacheConfig::Parse(method.name));
      reference |= method.name == "palu" && preset == "reference";
    }
  }
  EXPECT_TRUE(reference);
}

}  // namespace
}  // namespace palu
