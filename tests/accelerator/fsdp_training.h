#pragma once
// Training with FSDP on the simulated accelerator.

#include <memory>
#include <optional>

#include "accelerator/sim.h"
#include "comm/backend/backend.h"
#include "fsdp/training.h"
#include "support/accelerator/nccl/backend.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {

// Returns a transport of the simulated NCCL, as make_nccl does.
inline comm::Transport make_sim(const comm::BackendOptions& options) {
  using Sim = sim::NcclBackend;
  comm::Transport transport;
  transport.name = "sim";
  if (options.split) {
    transport.backend = static_cast<Sim&>(*options.split->group)
                            .make_subgroup(Sim::SplitOptions{options.split->color, options.rank, options.size});
  } else {
    transport.backend = c10::make_intrusive<Sim>(options.store, options.rank, options.size);
  }
  transport.is_on_stream = true;
  transport.abort = [](comm::Backend& backend) { static_cast<Sim&>(backend).abort_work(); };
  transport.connect = [](comm::Backend& backend, c10::Device) { static_cast<Sim&>(backend).connect(); };
  transport.leave_split = [](comm::Backend& backend, c10::Device) {
    static_cast<Sim&>(backend).make_subgroup(std::nullopt);
  };
  return transport;
}

// The same of a LibTorch that cannot abort work.
inline comm::Transport make_sim_without_abort(const comm::BackendOptions& options) {
  comm::Transport transport = make_sim(options);
  transport.abort = nullptr;
  return transport;
}

// Registers the accelerator, and the backends "sim", which has NCCL's semantics on it, and "sim without abort".
inline void use_accelerator() {
  sim::install();
  static const bool registered = [] {
    comm::register_backend("sim", make_sim);
    comm::register_backend("sim without abort", make_sim_without_abort);
    return true;
  }();
  (void)registered;
}

// Runs `f` on ranks with a simulated device each, which is the current one.
inline void run_on_devices(int ranks, FunctionRef<void(const ProcessGroup& group, at::Device device)> f) {
  use_accelerator();
  run_local(ranks,
            [&](const ProcessGroup& group) {
              const at::Device device = sim::device(group.rank());
              const c10::DeviceGuard guard(device);
              f(group, device);
            },
            {.backend = "sim"});
}

// Makes another stream the current one while it exists; the one that was waits for it then.
class OnAnotherStream {
 public:
  explicit OnAnotherStream(int device) : before_(sim::current(device)), stream_(sim::stream_from_pool(device)) {
    sim::wait_for(stream_, before_);
    guard_.emplace(stream_);
  }
  ~OnAnotherStream() {
    guard_.reset();
    sim::wait_for(before_, stream_);
  }
  OnAnotherStream(const OnAnotherStream&) = delete;
  OnAnotherStream& operator=(const OnAnotherStream&) = delete;

 private:
  c10::Stream before_, stream_;
  std::optional<c10::StreamGuard> guard_;
};

// As train(), and counts how often the host waits for the device.
inline Trained train_on_device(const ProcessGroup& group, at::Device device, const Training& training) {
  const auto enter_first_step = [&]() -> std::shared_ptr<void> {
    return training.begins_on_side_stream ? std::make_shared<OnAnotherStream>(device.index()) : nullptr;
  };
  return train(
      group, device, training, [&] { return sim::synchronizations(device.index()).total(); }, enter_first_step);
}

}  // namespace tessera::fsdp
