#pragma once
// LibTorch's autocast state of this thread, for all supported versions of LibTorch.

#include <ATen/autocast_mode.h>
#include <torch/version.h>

#include <array>

namespace tessera::fsdp {

class Autocast {
 public:
  static Autocast now() {
    Autocast now;
    for (std::size_t i = 0; i < kDevices.size(); ++i) now.modes_[i] = mode(kDevices[i]);
    now.caches_ = at::autocast::is_autocast_cache_enabled();
    return now;
  }
  bool is_on() const { return modes_[0].is_on || modes_[1].is_on; }
  void turn_on(at::DeviceType device, at::ScalarType dtype) { modes_[device == at::kCPU ? 0 : 1] = {true, dtype}; }
  // Also clears the cache of casts, which belong to another graph.
  void restore() const {
    for (std::size_t i = 0; i < kDevices.size(); ++i) set_mode(kDevices[i], modes_[i]);
    at::autocast::set_autocast_cache_enabled(caches_);
    at::autocast::clear_cache();
  }

 private:
  struct Mode {
    bool is_on = false;
    at::ScalarType dtype = at::kFloat;
  };
  static constexpr std::array kDevices{at::kCPU, at::kCUDA};

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)
  static Mode mode(at::DeviceType device) {
    return {at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)};
  }
  static void set_mode(at::DeviceType device, const Mode& mode) {
    at::autocast::set_autocast_enabled(device, mode.is_on);
    at::autocast::set_autocast_dtype(device, mode.dtype);
  }
#else
  static Mode mode(at::DeviceType device) {
    if (device == at::kCPU) return {at::autocast::is_cpu_enabled(), at::autocast::get_autocast_cpu_dtype()};
    return {at::autocast::is_enabled(), at::autocast::get_autocast_gpu_dtype()};
  }
  static void set_mode(at::DeviceType device, const Mode& mode) {
    if (device == at::kCPU) {
      at::autocast::set_cpu_enabled(mode.is_on);
      at::autocast::set_autocast_cpu_dtype(mode.dtype);
    } else {
      at::autocast::set_enabled(mode.is_on);
      at::autocast::set_autocast_gpu_dtype(mode.dtype);
    }
  }
#endif

  std::array<Mode, kDevices.size()> modes_;
  bool caches_ = true;
};

// Disables the cache of casts during its lifetime: tensors that are cast in no_grad have no gradient.
class NoAutocastCache {
 public:
  NoAutocastCache() : before_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~NoAutocastCache() { at::autocast::set_autocast_cache_enabled(before_); }
  NoAutocastCache(const NoAutocastCache&) = delete;
  NoAutocastCache& operator=(const NoAutocastCache&) = delete;

 private:
  bool before_;
};

}  // namespace tessera::fsdp
