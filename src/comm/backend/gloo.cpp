#include <csignal>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/backend/backend.h"

namespace tessera::comm {

namespace {

using ::c10d::ProcessGroupGloo;

// GLOO_SOCKET_IFNAME names the interface, as in PyTorch.
std::shared_ptr<::gloo::transport::Device> make_device() {
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  return interface != nullptr ? ProcessGroupGloo::createDeviceForInterface(interface)
                              : ProcessGroupGloo::createDefaultDevice();
}

// Gloo writes to the sockets of ranks that may have died and does not change SIGPIPE. Python ignores SIGPIPE, so
// PyTorch needs nothing here.
void ignore_broken_pipes() {
  struct sigaction action {};
  if (::sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

const MakeBackend make_gloo = [](const BackendOptions& options) -> Transport {
  ignore_broken_pipes();
  auto gloo = ProcessGroupGloo::Options::create(options.timeout);
  gloo->devices = {make_device()};
  gloo->threads = 2;
  return {"gloo", c10::make_intrusive<ProcessGroupGloo>(options.store, options.rank, options.size, gloo)};
};

}  // namespace tessera::comm
