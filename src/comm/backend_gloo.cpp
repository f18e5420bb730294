#include <cstdlib>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/backend.h"

namespace tessera::comm {

namespace {

using ::c10d::ProcessGroupGloo;

// GLOO_SOCKET_IFNAME names the interface, as for PyTorch.
std::shared_ptr<::gloo::transport::Device> make_device() {
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  return interface != nullptr ? ProcessGroupGloo::createDeviceForInterface(interface)
                              : ProcessGroupGloo::createDefaultDevice();
}

}  // namespace

const MakeBackend make_gloo = [](const BackendOptions& options) -> BackendPtr {
  auto gloo = ProcessGroupGloo::Options::create(options.timeout);
  gloo->devices = {make_device()};
  gloo->threads = 2;
  return c10::make_intrusive<ProcessGroupGloo>(options.store, options.rank, options.size, gloo);
};

}  // namespace tessera::comm
