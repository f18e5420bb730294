#pragma once
// Training with FSDP on the simulated accelerator.

#include <functional>
#include <memory>

#include "accelerator/sim.h"
#include "comm/backend/backend.h"
#include "fsdp/training.h"
#include "support/accelerator/nccl/backend.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {

// Registers the accelerator, and the backend "sim", which has NCCL's semantics on it.
inline void use_accelerator() {
  sim::install();
  static const bool registered = (comm::register_backend("sim",
                                                         [](const comm::BackendOptions& options) {
                                                           comm::Transport transport;
                                                           transport.name = "sim";
                                                           transport.backend = c10::make_intrusive<sim::NcclBackend>(
                                                               options.store, options.rank, options.size);
                                                           transport.is_on_stream = true;
                                                           transport.device_type = c10::DeviceType::PrivateUse1;
                                                           transport.abort = [](comm::Backend& backend) {
                                                             static_cast<sim::NcclBackend&>(backend).abort_work();
                                                           };
                                                           return transport;
                                                         }),
                                  true);
  (void)registered;
}

// Runs `f` on ranks with a simulated device each, which is the current one.
inline void run_on_devices(int ranks, const std::function<void(const ProcessGroup& group, at::Device device)>& f) {
  use_accelerator();
  run_local(ranks,
            [&](const ProcessGroup& group) {
              const at::Device device = sim::device(group.rank());
              const c10::DeviceGuard guard(device);
              f(group, device);
            },
            {.backend = "sim"});
}

// As train(), and counts how often the host waits for the device.
inline Trained train_on_device(const ProcessGroup& group, at::Device device, const Training& training) {
  const auto enter_side_stream = [&]() -> std::shared_ptr<void> {
    if (!training.is_on_side_stream) return nullptr;
    const c10::Stream side = sim::stream_from_pool(device.index());
    sim::wait_for(side, sim::current(device.index()));
    return std::make_shared<c10::StreamGuard>(side);
  };
  return train(
      group, device, training, [&] { return sim::synchronizations(device.index()).total(); }, enter_side_stream);
}

}  // namespace tessera::fsdp
