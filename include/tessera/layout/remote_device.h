#pragma once
/// \file
/// The location of a shard: a device and the rank or worker that owns it. These are names only; no device is opened.
///
/// Law: `RemoteDevice(to_string(d)) == d`, unless d is a worker named like a device. Plain values. PyTorch:
/// torch/distributed/remote_device.py, c10/core/Device.cpp.

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// A device in the notation of `torch.device`: "cpu", "cuda", "cuda:1".
struct Device {
  std::string type = "cpu";
  std::int32_t index = -1;  ///< -1: the current device of its type

  /// Parses `TYPE` or `TYPE:INDEX`: a device type that PyTorch knows, and an index from 0 to 127 without leading zeros.
  /// Throws `Error(invalid_argument)` naming the part that is wrong.
  static Device parse(std::string_view text);
  /// Same as `parse`, but returns nothing instead of throwing.
  static std::optional<Device> find(std::string_view text);
  bool operator==(const Device&) const = default;
};

/// Returns "cuda:1", or "cuda" without an index.
std::string to_string(const Device& device);

/// A device of a rank, of a named RPC worker or, with neither, of this process.
class RemoteDevice {
 public:
  /// Parses one of
  ///   rank:RANK/DEVICE, rank:RANK        the second means "rank:RANK/cpu"
  ///   WORKER/DEVICE, WORKER              the second means "WORKER/cpu"; a worker's name has no ':' and no '/'
  ///   DEVICE
  /// Throws `Error(invalid_argument)` quoting `text` and listing these forms.
  explicit RemoteDevice(std::string_view text);
  explicit RemoteDevice(Device device) : device_(std::move(device)) {}
  /// Creates a device of a rank. Throws `Error(invalid_argument)` if `rank` is negative.
  RemoteDevice(std::int64_t rank, Device device);

  const std::optional<std::string>& worker_name() const { return worker_name_; }
  std::optional<std::int64_t> rank() const { return rank_; }
  const Device& device() const { return device_; }
  /// Returns another device of the same worker or rank.
  RemoteDevice with(Device device) const {
    RemoteDevice other = *this;
    other.device_ = std::move(device);
    return other;
  }
  /// Returns the device without its index: what all ranks know of it. See `comparable_text` in shard_metadata.h.
  RemoteDevice without_index() const { return with({device_.type, -1}); }

  bool operator==(const RemoteDevice&) const = default;

 private:
  std::optional<std::string> worker_name_;
  std::optional<std::int64_t> rank_;
  Device device_;
};

/// Returns "rank:0/cuda:1", "worker0/cpu" or "cpu".
std::string to_string(const RemoteDevice& device);
std::ostream& operator<<(std::ostream& out, const RemoteDevice& device);

}  // namespace tessera
