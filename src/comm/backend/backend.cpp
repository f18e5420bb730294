#include "comm/backend/backend.h"

#include <fmt/ranges.h>

#include <array>
#include <utility>

#include "comm/rendezvous/store.h"
#include "tessera/base/error.h"
#include "tessera/comm/init.h"

namespace tessera {

namespace {

std::array<std::pair<const char*, comm::MakeBackend>, 3> backends() {
  return {{{"gloo", comm::make_gloo}, {"nccl", comm::make_nccl}, {"mpi", comm::make_mpi}}};
}

comm::Transport make_transport(const std::string& name, const comm::BackendOptions& options) {
  for (const auto& [known, make] : backends()) {
    if (name == known && make != nullptr) return {name, make(options)};
  }
  fail(ErrorCode::unsupported, "init process group: this LibTorch has no backend '{}', expected one of: {}",
       printable(name), fmt::join(available_backends(), ", "));
}

}  // namespace

std::vector<std::string> available_backends() {
  std::vector<std::string> names;
  for (const auto& [name, make] : backends()) {
    if (make != nullptr) names.emplace_back(name);
  }
  return names;
}

comm::Transports comm::make_transports(const std::string& name, const BackendOptions& options) {
  const Transport transport = make_transport(name, options);
  if (name != "nccl") return {transport, transport};
  BackendOptions beside = options;
  beside.store = with_prefix("cpu", options.store);
  return {make_transport("gloo", beside), transport};
}

}  // namespace tessera
