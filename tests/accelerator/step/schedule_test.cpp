// When the tasks of a trace run, at rates of 1 flop, 10 bytes of memory and 2 bytes of a link in a second.

#include "support/accelerator/schedule.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>

namespace tessera::sim {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Rates kRates{.flops_per_second = 1, .memory_bytes_per_second = 10, .link_bytes_per_second = 2};

TraceEntry work(std::int64_t stream, std::int64_t seconds) {
  return {.stream = stream, .name = "op", .flops = seconds};
}
TraceEntry record(std::int64_t stream, std::int64_t point) {
  return {.stream = stream, .name = "record", .point = point};
}
TraceEntry wait(std::int64_t stream, std::int64_t point) { return {.stream = stream, .name = "wait", .point = point}; }
TraceEntry gather(int device, std::int64_t bytes) {
  return {.device = device, .name = "gather", .meeting = 1, .bytes = bytes};
}

TEST(ScheduleTest, StreamsRunTheirTasksInOrderAndSideBySide) {
  EXPECT_THAT(schedule({work(0, 1), work(1, 5), work(0, 2)}, kRates),
              ElementsAre(Interval{0, 1}, Interval{0, 5}, Interval{1, 3}));
}

TEST(ScheduleTest, ATaskTakesTheMoreOfItsTwoRates) {
  EXPECT_THAT(schedule({{.name = "op", .bytes = 40, .flops = 3}, {.name = "op", .bytes = 40, .flops = 6}}, kRates),
              ElementsAre(Interval{0, 4}, Interval{4, 10}));
}

TEST(ScheduleTest, AWaitEndsWhenItsPointIsReached) {
  EXPECT_THAT(schedule({wait(0, 7), work(0, 1), work(1, 3), record(1, 7), work(1, 1)}, kRates),
              ElementsAre(Interval{0, 3}, Interval{3, 4}, Interval{0, 3}, Interval{3, 3}, Interval{3, 4}));
  EXPECT_THAT(schedule({work(1, 3), record(1, 7), work(0, 5), wait(0, 7)}, kRates),
              ElementsAre(Interval{0, 3}, Interval{3, 3}, Interval{0, 5}, Interval{5, 5}));
}

TEST(ScheduleTest, APointThatTheTraceDoesNotHaveWasReachedBefore) {
  EXPECT_THAT(schedule({work(0, 2), wait(0, 7)}, kRates), ElementsAre(Interval{0, 2}, Interval{2, 2}));
}

TEST(ScheduleTest, ACollectiveBeginsWhenAllRanksAreAtIt) {
  TraceEntry late = work(0, 4);
  late.device = 1;
  EXPECT_THAT(schedule({work(0, 1), gather(0, 6), work(0, 1), late, gather(1, 6)}, kRates),
              ElementsAre(Interval{0, 1}, Interval{4, 7}, Interval{7, 8}, Interval{0, 4}, Interval{4, 7}));
}

TEST(ScheduleTest, StreamsThatWaitForEachOtherAreAnError) {
  try {
    (void)schedule({wait(0, 1), record(0, 2), wait(1, 2), record(1, 1)}, kRates);
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("schedule: stream 0 of device 0 never runs 'wait', expected a trace of all"));
  }
}

TEST(ScheduleTest, UnionsCountEachTimeOnce) {
  const std::vector<Interval> a{{4, 6}, {0, 2}, {1, 3}, {5, 5}}, b{{2, 5}, {2.5, 4.5}};
  EXPECT_THAT(merged(a), ElementsAre(Interval{0, 3}, Interval{4, 6}));
  EXPECT_EQ(seconds_of(a), 5);
  EXPECT_EQ(common_seconds(a, b), 2);
  EXPECT_THAT(difference(a, b), ElementsAre(Interval{0, 2}, Interval{5, 6}));
  EXPECT_THAT(difference({{0, 9}}, a), ElementsAre(Interval{3, 4}, Interval{6, 9}));
}

}  // namespace
}  // namespace tessera::sim
