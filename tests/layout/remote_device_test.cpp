#include "tessera/layout/remote_device.h"

#include <gtest/gtest.h>

#include "layout/sharding_golden.h"
#include "support/error_matchers.h"

namespace tessera {
namespace {

TEST(RemoteDeviceTest, ReadsAndRefusesWhatPyTorchReadsAndRefuses) {
  for (const nlohmann::json& example : testing::sharding_cases("remote_devices")) {
    const std::string text = example[0];
    if (example[1].is_null()) {
      EXPECT_ERROR(RemoteDevice(text), ErrorCode::invalid_argument, "remote device '" + text + "'",
                   "'<worker>/<device>', 'rank:<rank>/<device>' or '<device>'");
      continue;
    }
    const RemoteDevice device(text);
    const nlohmann::json found = {device.worker_name() ? nlohmann::json(*device.worker_name()) : nlohmann::json(),
                                  device.rank() ? nlohmann::json(*device.rank()) : nlohmann::json(),
                                  to_string(device.device()), to_string(device)};
    EXPECT_EQ(found, example[1]) << text;
  }
}

TEST(RemoteDeviceTest, PrintsWhatItReads) {
  for (const nlohmann::json& example : testing::sharding_cases("remote_devices")) {
    if (example[1].is_null()) continue;
    const RemoteDevice device(example[0].get<std::string>());
    EXPECT_EQ(RemoteDevice(to_string(device)), device);
  }
}

TEST(RemoteDeviceTest, ErrorsSayWhatIsWrong) {
  EXPECT_ERROR(RemoteDevice("a/b/c"), ErrorCode::invalid_argument, "'a/b/c'", "more than one '/'");
  EXPECT_ERROR(RemoteDevice("worker0/gpu"), ErrorCode::invalid_argument, "'gpu' is not a device");
  EXPECT_ERROR(RemoteDevice("/cpu"), ErrorCode::invalid_argument, "no worker");
  EXPECT_ERROR(RemoteDevice("rank:x/cpu"), ErrorCode::invalid_argument, "'x' is not a rank");
  EXPECT_ERROR(RemoteDevice("rank:99999999999999999999"), ErrorCode::invalid_argument, "is not a rank");
  EXPECT_ERROR(RemoteDevice("ranks:0/cpu"), ErrorCode::invalid_argument, "'ranks:0' is not a worker");
  EXPECT_ERROR(RemoteDevice(-1, Device{}), ErrorCode::invalid_argument, "rank -1");
}

TEST(RemoteDeviceTest, DevicesAreEqualByTypeAndIndex) {
  EXPECT_EQ(RemoteDevice(3, Device{"cuda", 1}), RemoteDevice("rank:3/cuda:1"));
  EXPECT_EQ(RemoteDevice(Device{"cuda", -1}), RemoteDevice("cuda"));
  EXPECT_NE(RemoteDevice("cuda"), RemoteDevice("cuda:0"));
  EXPECT_NE(RemoteDevice("rank:0/cpu"), RemoteDevice("rank:1/cpu"));
  EXPECT_NE(RemoteDevice("cpu"), RemoteDevice("rank:0/cpu"));
}

TEST(DeviceTest, ErrorsSayWhatIsWrong) {
  EXPECT_EQ(Device::parse("cuda:12"), (Device{"cuda", 12}));
  EXPECT_ERROR(Device::parse("gpu:0"), ErrorCode::invalid_argument, "device 'gpu:0'", "no type 'gpu'");
  EXPECT_ERROR(Device::parse("cuda:"), ErrorCode::invalid_argument, "an index from 0 to 127 after 'cuda:'");
  EXPECT_ERROR(Device::parse("cuda:128"), ErrorCode::invalid_argument, "an index from 0 to 127 after 'cuda:'");
  EXPECT_ERROR(Device::parse(""), ErrorCode::invalid_argument, "device ''");
}

}  // namespace
}  // namespace tessera
