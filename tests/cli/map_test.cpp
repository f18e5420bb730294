// `tessera map`: the file that it writes, the files that it refuses to overwrite, and the data in the page.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "support/golden.h"
#include "support/temporary_directory.h"
#include "tessera/checkpoint/mosaic.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// The data of the page, found as by a browser: up to the first "</script".
json data_of(const std::string& page) {
  const std::string begin = "<script type=\"application/json\" id=\"data\">";
  const std::size_t at = page.find(begin) + begin.size();
  return json::parse(page.substr(at, page.find("</script", at) - at));
}

std::string page_of(const std::string& checkpoint) {
  const Outcome outcome = run_tessera({"map", checkpoint, "-o", "-"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  return outcome.out;
}

class MapGoldenTest : public ::testing::TestWithParam<std::string> {};

TEST_P(MapGoldenTest, DataIsThatOfInspect) {
  const json data = data_of(page_of(golden(GetParam())));
  const json shown = json::parse(run_tessera({"inspect", "--json", golden(GetParam())}).out);
  EXPECT_EQ(data["kind"], shown["kind"]);
  ASSERT_EQ(data["tensors"].size(), shown["tensors"].size());
  for (const json& row : data["tensors"]) {
    const json& tensor = shown["tensors"].at(row[0].get<std::string>());
    EXPECT_EQ(data["dtypes"][row[1].get<std::size_t>()][0], tensor["dtype"]);
    EXPECT_EQ(row[2], tensor["shape"]);
    json numbers = json::array();
    for (const json& chunk : tensor["chunks"]) {
      for (const json& offset : chunk["offsets"]) numbers.push_back(offset);
      for (const json& size : chunk["sizes"]) numbers.push_back(size);
      numbers.push_back(chunk["file"]);
      numbers.push_back(nullptr);
    }
    ASSERT_EQ(row[3].size(), numbers.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      if (numbers[i].is_string()) {
        EXPECT_EQ(data["files"][row[3][i].get<std::size_t>()][0], numbers[i]);
      } else if (!numbers[i].is_null()) {
        EXPECT_EQ(row[3][i], numbers[i]);
      }
    }
  }
}

TEST_P(MapGoldenTest, ReachesNoNetworkAndIsDeterministic) {
  const std::string page = page_of(golden(GetParam()));
  EXPECT_THAT(page, StartsWith(std::string(checkpoint::kMosaicBegin)));
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
  // The only address is the name of the SVG namespace.
  for (std::size_t at = page.find("://"); at != std::string::npos; at = page.find("://", at + 1)) {
    EXPECT_EQ(page.substr(at - 4, 30), "http://www.w3.org/2000/svg', t");
  }
  EXPECT_EQ(page, page_of(golden(GetParam())));
}

INSTANTIATE_TEST_SUITE_P(Golden, MapGoldenTest, ::testing::ValuesIn(golden_names()),
                         [](const auto& name) { return test_name(name.param); });

TEST(MapCommandTest, WritesAndReplacesItsOwnPages) {
  const TemporaryDirectory folder;
  for (int i = 0; i < 2; ++i) {
    const Outcome outcome = run_tessera({"map", golden("2.14-optim"), "-o", folder / "map.html"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, StartsWith("wrote " + (folder / "map.html").string() + ": 16 tensors"));
  }
  EXPECT_EQ(read_text(folder / "map.html"), page_of(golden("2.14-optim")));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("map.html"));
}

TEST(MapCommandTest, OverwritesNothingElse) {
  const TemporaryDirectory folder;
  write_text(folder / "notes.html", "<!doctype html>\nprecious");
  write_text(folder / "empty", "");
  const fs::path model = folder / "model.pt";
  ASSERT_EQ(run_tessera({"convert", golden("2.14-optim"), model}).status, 0);
  const std::string before = read_text(model);
  for (const fs::path& output :
       {folder / "notes.html", folder / "empty", model, folder.path(), fs::path("/dev/null")}) {
    const Outcome outcome = run_tessera({"map", model, "-o", output});
    EXPECT_EQ(outcome.status, 3) << output;
    EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("the file exists and was not written by 'tessera map'"));
  }
  EXPECT_EQ(read_text(model), before);
  EXPECT_EQ(read_text(folder / "notes.html"), "<!doctype html>\nprecious");
}

TEST(MapCommandTest, MissingFolderIsSaid) {
  const Outcome outcome = run_tessera({"map", golden("2.14-optim"), "-o", "/nowhere/at/all.html"});
  EXPECT_EQ(outcome.status, 3);
  EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("/nowhere/at/all.html"));
}

TEST(MosaicTest, HostileNamesStayData) {
  const TemporaryDirectory folder;
  const std::string name = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&amp;";
  json header;
  header[name] = {{"dtype", "U8"}, {"shape", {1}}, {"data_offsets", {0, 1}}};
  std::string text = header.dump();
  text.append(8 - text.size() % 8, ' ');
  std::string length(8, '\0');
  length[0] = static_cast<char>(text.size());
  write_text(folder / "<b>&x.safetensors", length + text + "a");
  const std::string page = page_of(folder / "<b>&x.safetensors");
  EXPECT_EQ(data_of(page)["tensors"][0][0], name);
  EXPECT_EQ(data_of(page)["name"], "<b>&x.safetensors");
  EXPECT_THAT(page, Not(HasSubstr("<script>alert")));
  EXPECT_THAT(page, Not(HasSubstr("<img")));
  EXPECT_THAT(page, Not(HasSubstr("<b>&x")));
  EXPECT_THAT(page, HasSubstr("<title>&lt;b>&amp;x.safetensors - tessera</title>"));
}

TEST(MosaicTest, TotalsAreThereWithoutJavaScript) {
  EXPECT_THAT(page_of(golden("2.14-optim")), HasSubstr("<noscript><p>ck: 16 tensors, "));
}

TEST(MosaicTest, RankIsReadOffTheFileName) {
  using checkpoint::rank_of_file;
  EXPECT_EQ(rank_of_file("__3_0.distcp"), 3);
  EXPECT_EQ(rank_of_file("__120_17.distcp"), 120);
  EXPECT_EQ(rank_of_file("sub/__1_0.distcp"), 1);
  EXPECT_EQ(rank_of_file("shard-00002-model-00001-of-00001.safetensors"), 1);
  for (const std::string_view name :
       {"", "__", "__x_0.distcp", "__3.distcp", "__-3_0.distcp", "__99999999999999999999_0.distcp",
        "shard-00000-model-x", "shard-1", "model-00001-of-00002.safetensors", "data"}) {
    EXPECT_EQ(rank_of_file(name), std::nullopt) << name;
  }
}

}  // namespace
}  // namespace tessera::testing
