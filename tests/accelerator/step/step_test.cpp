// What overlaps in a step of FSDP, at the rates of the picture in docs/streams.md.

#include "accelerator/step/step.h"

#include <gmock/gmock.h>

#include <map>
#include <set>

#include "accelerator/step/picture.h"

namespace tessera::fsdp {
namespace {

using ::testing::HasSubstr;
using Kind = Work::Kind;

// The times of a kind of work, in their order; of all units, or of one.
std::vector<sim::Interval> times_of(const Step& step, Kind kind, int unit = -1) {
  std::vector<sim::Interval> times;
  for (const Work& work : step.work) {
    if (work.kind == kind && (unit < 0 || work.unit == unit)) times.push_back(work.time);
  }
  return times;
}

Step step_of(bool prefetches) {
  StepModel model;
  model.prefetches = prefetches;
  return schedule_step(model, kStepRates);
}

constexpr int kStepBlocks = StepModel().blocks;

TEST(FsdpStepTest, UnitsAreGatheredWhileTheUnitBeforeIsComputed) {
  const Step step = step_of(true);
  for (int i = 0; i + 1 < kStepBlocks; ++i) {
    const std::vector<sim::Interval> next = times_of(step, Kind::gather, i + 1);
    ASSERT_FALSE(next.empty()) << i;
    EXPECT_DOUBLE_EQ(sim::common_seconds({next.front()}, times_of(step, Kind::forward, i)), next.front().seconds())
        << "forward of block " << i;
  }
  for (int i = kStepBlocks - 1; i > 0; --i) {
    const std::vector<sim::Interval> next = times_of(step, Kind::gather, i - 1);
    ASSERT_EQ(next.size(), 2U) << i;
    std::vector<sim::Interval> computed = times_of(step, Kind::backward, i);
    if (i + 1 == kStepBlocks) {  // the host is there before the device has computed the backward of the head
      const std::vector<sim::Interval> head = times_of(step, Kind::backward, kStepBlocks);
      computed.insert(computed.begin(), head.begin(), head.end());
    }
    EXPECT_DOUBLE_EQ(sim::common_seconds({next.back()}, computed), next.back().seconds()) << "backward of block " << i;
  }
}

TEST(FsdpStepTest, GradientsAreReducedDuringTheBackwardOfTheUnitAfter) {
  const Step step = step_of(true);
  for (int i = kStepBlocks - 1; i > 0; --i) {
    const std::vector<sim::Interval> reduction = times_of(step, Kind::reduction, i);
    ASSERT_EQ(reduction.size(), 1U) << i;
    EXPECT_DOUBLE_EQ(sim::common_seconds(reduction, times_of(step, Kind::backward, i - 1)), reduction.front().seconds())
        << "block " << i;
  }
}

TEST(FsdpStepTest, OnlyTheFirstGatherAndTheLastReductionsAreExposed) {
  const Step step = step_of(true), without = step_of(false);
  const double exposed = sim::seconds_of(step.exposed);
  EXPECT_LE(exposed, sim::seconds_of(times_of(step, Kind::gather, kStepBlocks)) +
                         times_of(step, Kind::gather, 0).front().seconds() +
                         sim::seconds_of(times_of(step, Kind::reduction, 0)) +
                         sim::seconds_of(times_of(step, Kind::reduction, kStepBlocks)) + step.seconds / 1000);
  EXPECT_LT(step.exposed_share(), 0.08);
  EXPECT_GT(without.exposed_share(), 0.25);
  EXPECT_GT(without.seconds, 1.25 * step.seconds);
}

TEST(FsdpStepTest, ComputationsGathersAndReductionsAreOnStreamsOfTheirOwn) {
  const Step step = step_of(true);
  std::map<Kind, std::set<std::int64_t>> streams;
  for (const Work& work : step.work) streams[work.kind].insert(work.stream);
  for (const Kind kind : {Kind::forward, Kind::backward, Kind::optimizer})
    EXPECT_EQ(streams[kind], std::set<std::int64_t>{0});
  ASSERT_EQ(streams[Kind::gather].size(), 1U);
  ASSERT_EQ(streams[Kind::reduction].size(), 1U);
  EXPECT_NE(streams[Kind::gather], streams[Kind::reduction]);
  EXPECT_NE(*streams[Kind::gather].begin(), 0);
  EXPECT_NE(*streams[Kind::reduction].begin(), 0);
}

TEST(FsdpStepTest, APictureHasALaneForEachStreamAndABarForEachUnit) {
  Step step;
  step.seconds = 4e-3;
  step.work = {{Kind::forward, 0, 0, {1e-3, 2e-3}},
               {Kind::gather, 0, 2, {0, 1e-3}},
               {Kind::reduction, 1, 3, {2e-3, 4e-3}},
               {Kind::other, -1, 9, {1e-3, 2e-3}}};
  step.exposed = {{0, 1e-3}};
  const std::string svg = picture_of({{"A step", step}}, 1, {"of a test"});
  EXPECT_EQ(svg.rfind("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=", 0), 0U);
  for (const char* text : {">A step</text>", ">of a test</text>", ">computation</text>", ">unshard</text>",
                           ">reduce</text>", ">stream 9</text>", ">own</text>", "</svg>\n",
                           R"(<rect x="96" y="86" width="222" height="22" class="gather"/>)",
                           R"(<rect x="96" y="56" width="223" height="108" class="exposed"/>)"})
    EXPECT_THAT(svg, HasSubstr(text));
}

}  // namespace
}  // namespace tessera::fsdp
