// Reads checkpoints that PyTorch 1.13, 2.6 and 2.14 wrote and compares them with their manifests.

#include <gtest/gtest.h>

#include "support/golden.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/format/python_value.h"

namespace tessera::checkpoint {
namespace {

using testing::Golden;

class GoldenTest : public ::testing::TestWithParam<std::string> {
 protected:
  const Golden golden_ = testing::read_golden(GetParam());
};

TEST_P(GoldenTest, EveryTensorHasItsDTypeShapeAndBytes) {
  EXPECT_EQ(testing::read_tensors(Checkpoint::open(golden_.checkpoint)), golden_.tensors);
}

TEST_P(GoldenTest, EveryObjectHasItsValue) {
  const auto checkpoint = Checkpoint::open(golden_.checkpoint);
  for (const auto& [name, text] : golden_.plain) {
    const auto index = checkpoint->find_object(name);
    if (name == "nested") {  // {'deep': {'er': [1, {'x': 2}]}}, which PyTorch flattens
      EXPECT_FALSE(index);
      EXPECT_EQ(checkpoint->load_object(checkpoint->find_object("nested.deep.er.0").value()).value.integer(), 1);
      EXPECT_EQ(checkpoint->load_object(checkpoint->find_object("nested.deep.er.1.x").value()).value.integer(), 2);
      continue;
    }
    ASSERT_TRUE(index) << name;
    EXPECT_EQ(pickle::repr(checkpoint->load_object(*index).value), text) << name;
  }
}

TEST_P(GoldenTest, VerifiesWithEveryByteAccountedFor) {
  const VerifyReport report = verify(golden_.checkpoint);
  for (const Problem& problem : report.problems) ADD_FAILURE() << problem.what;
  EXPECT_TRUE(report.good());
  EXPECT_EQ(report.tensors, golden_.tensors.size());
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, GoldenTest, ::testing::ValuesIn(testing::golden_names()),
                         [](const auto& test) { return testing::test_name(test.param); });

}  // namespace
}  // namespace tessera::checkpoint
