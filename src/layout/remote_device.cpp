#include "tessera/layout/remote_device.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <ostream>

#include "tessera/base/error.h"

namespace tessera {

namespace {

// The device types of PyTorch 1.13 to 2.14.
constexpr std::array<std::string_view, 21> kDeviceTypes = {
    "cpu", "cuda", "ipu", "xpu",  "mkldnn", "opengl", "opencl", "ideep", "hip",  "ve",           "fpga",
    "ort", "maia", "xla", "lazy", "vulkan", "mps",    "meta",   "hpu",   "mtia", "privateuseone"};
constexpr std::int32_t kMaxIndex = 127;  // c10::DeviceIndex has 8 bits

// Parses decimal digits without a sign.
template <typename T>
std::optional<T> parse_count(std::string_view digits) {
  T value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size() || value < 0 || digits[0] == '-')
    return std::nullopt;
  return value;
}

[[noreturn]] void fail_to_parse(std::string_view text, std::string_view why) {
  fail(ErrorCode::invalid_argument,
       "remote device '{}': {}, expected '<worker>/<device>', 'rank:<rank>/<device>' or '<device>'", printable(text),
       why);
}

}  // namespace

std::optional<Device> Device::find(std::string_view text) {
  const std::size_t colon = text.find(':');
  Device device;
  device.type = text.substr(0, colon);
  if (std::find(kDeviceTypes.begin(), kDeviceTypes.end(), device.type) == kDeviceTypes.end()) return std::nullopt;
  if (colon == std::string_view::npos) return device;
  const std::string_view digits = text.substr(colon + 1);
  if (digits.size() > 1 && digits[0] == '0') return std::nullopt;
  const auto index = parse_count<std::int32_t>(digits);
  if (!index || *index > kMaxIndex) return std::nullopt;
  device.index = *index;
  return device;
}

Device Device::parse(std::string_view text) {
  if (std::optional<Device> device = find(text)) return *std::move(device);
  const std::string_view type = text.substr(0, text.find(':'));
  if (std::find(kDeviceTypes.begin(), kDeviceTypes.end(), type) != kDeviceTypes.end()) {
    fail(ErrorCode::invalid_argument, "device '{}': expected an index from 0 to {} after '{}:'", printable(text),
         kMaxIndex, type);
  }
  fail(ErrorCode::invalid_argument, "device '{}': PyTorch has no type '{}', expected cpu, cuda, meta, ...",
       printable(text), printable(type));
}

std::string to_string(const Device& device) {
  return device.index < 0 ? device.type : fmt::format("{}:{}", device.type, device.index);
}

RemoteDevice::RemoteDevice(std::string_view text) {
  const std::size_t slash = text.find('/');
  std::string_view worker = text.substr(0, slash);
  if (slash == std::string_view::npos) {
    if (std::optional<Device> local = Device::find(text)) {
      device_ = *std::move(local);
      return;
    }
  } else {
    const std::string_view device = text.substr(slash + 1);
    if (device.find('/') != std::string_view::npos) fail_to_parse(text, "more than one '/'");
    std::optional<Device> found = Device::find(device);
    if (!found) fail_to_parse(text, fmt::format("'{}' is not a device", printable(device)));
    device_ = *std::move(found);
  }
  if (worker.empty()) fail_to_parse(text, "no worker");
  const std::size_t colon = worker.find(':');
  if (colon == std::string_view::npos) {
    worker_name_ = worker;
    return;
  }
  if (worker.substr(0, colon) != "rank") fail_to_parse(text, fmt::format("'{}' is not a worker", printable(worker)));
  rank_ = parse_count<std::int64_t>(worker.substr(colon + 1));
  if (!rank_) fail_to_parse(text, fmt::format("'{}' is not a rank", printable(worker.substr(colon + 1))));
}

RemoteDevice::RemoteDevice(std::int64_t rank, Device device) : rank_(rank), device_(std::move(device)) {
  if (rank < 0) fail(ErrorCode::invalid_argument, "remote device of rank {}: expected a rank >= 0", rank);
}

std::string to_string(const RemoteDevice& device) {
  std::string local = to_string(device.device());
  if (device.worker_name()) return fmt::format("{}/{}", *device.worker_name(), local);
  if (device.rank()) return fmt::format("rank:{}/{}", *device.rank(), local);
  return local;
}

std::ostream& operator<<(std::ostream& out, const RemoteDevice& device) { return out << to_string(device); }

}  // namespace tessera
