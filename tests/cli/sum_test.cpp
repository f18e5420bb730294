// `tessera sum`.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "support/temporary_directory.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

class SumTest : public ::testing::Test {
 protected:
  SumTest() { fs::copy(golden("2.14-optim"), checkpoint_, fs::copy_options::recursive); }

 private:
  const TemporaryDirectory directory_;

 protected:
  const std::string checkpoint_ = directory_ / "ck";
};

TEST_F(SumTest, VerifyComparesWithWhatItWrote) {
  EXPECT_THAT(run_tessera({"verify", checkpoint_}).out, HasSubstr("no sidecar"));
  const Outcome outcome = run_tessera({"sum", checkpoint_});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, ContainsRegex("wrote .*/ck/.tessera.json: checksums of [0-9]+ files, [0-9.]+ KiB\n"));
  EXPECT_THAT(run_tessera({"verify", checkpoint_}).out, HasSubstr("sidecar agrees"));
  EXPECT_THAT(run_tessera({"sum", checkpoint_}).out, HasSubstr(".tessera.json agrees: checksums of "));
}

TEST_F(SumTest, ADisagreeingSidecarIsReplacedByForceOnly) {
  run_tessera({"sum", checkpoint_});
  put_byte(checkpoint_ + "/__0_0.distcp", 900, 0x55);
  const Outcome refused = run_tessera({"sum", checkpoint_});
  EXPECT_EQ(refused.status, 1);
  EXPECT_THAT(refused.out, HasSubstr("as in the sidecar"));
  EXPECT_THAT(refused.out, HasSubstr("was not written: "));
  EXPECT_THAT(refused.out, HasSubstr("--force"));
  const auto report = nlohmann::json::parse(run_tessera({"sum", checkpoint_, "--json"}).out);
  EXPECT_EQ(report["written"], false);
  EXPECT_GE(report["problem_count"], 1);
  const auto forced = nlohmann::json::parse(run_tessera({"sum", checkpoint_, "--force", "--json"}).out);
  EXPECT_EQ(forced["written"], true);
  EXPECT_EQ(forced["replaced"], true);
}

}  // namespace
}  // namespace tessera::testing
