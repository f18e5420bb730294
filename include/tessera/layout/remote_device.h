#pragma once
/// \file
/// Where a shard lives: a device, and the rank or the worker that has it. Names only; nothing here opens a device.
///
/// Law: `RemoteDevice(to_string(d)) == d`, unless d is a worker called like a device.
/// Plain values. PyTorch: torch/distributed/remote_device.py, c10/core/Device.cpp.

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// A device as `torch.device` names it: "cpu", "cuda", "cuda:1".
struct Device {
  std::string type = "cpu";
  std::int32_t index = -1;  ///< -1: the current one of its type

  /// Reads `TYPE` or `TYPE:INDEX`: a type that PyTorch knows, an index from 0 to 127 without leading zeros. Throws
  /// `Error(invalid_argument)` saying which of it is wrong.
  static Device parse(std::string_view text);
  /// As `parse`; nothing where that throws.
  static std::optional<Device> find(std::string_view text);
  bool operator==(const Device&) const = default;
};

/// "cuda:1"; "cuda" without an index.
std::string to_string(const Device& device);

/// A device of a worker: of the rank that is given, of the RPC worker that is named, or, with neither, of this process.
class RemoteDevice {
 public:
  /// Reads one of
  ///   rank:RANK/DEVICE, rank:RANK        the second means "rank:RANK/cpu"
  ///   WORKER/DEVICE, WORKER              the second means "WORKER/cpu"; a worker's name has no ':' and no '/'
  ///   DEVICE
  /// Throws `Error(invalid_argument)` that quotes `text` and lists these forms.
  explicit RemoteDevice(std::string_view text);
  explicit RemoteDevice(Device device) : device_(std::move(device)) {}
  /// The device of a rank, which must be >= 0 (`Error(invalid_argument)` otherwise).
  RemoteDevice(std::int64_t rank, Device device);

  const std::optional<std::string>& worker_name() const { return worker_name_; }
  std::optional<std::int64_t> rank() const { return rank_; }
  const Device& device() const { return device_; }

  bool operator==(const RemoteDevice&) const = default;

 private:
  std::optional<std::string> worker_name_;
  std::optional<std::int64_t> rank_;
  Device device_;
};

/// "rank:0/cuda:1", "worker0/cpu", "cpu"
std::string to_string(const RemoteDevice& device);
std::ostream& operator<<(std::ostream& out, const RemoteDevice& device);

}  // namespace tessera
