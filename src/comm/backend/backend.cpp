#include "comm/backend/backend.h"

#include <fmt/ranges.h>

#include <future>
#include <thread>
#include <utility>
#include <vector>

#include "comm/backend/run_unless.h"
#include "comm/rendezvous/store.h"
#include "tessera/base/error.h"
#include "tessera/comm/init.h"

namespace tessera {

namespace {

using Backends = std::vector<std::pair<std::string, comm::MakeBackend>>;

Backends& backends() {
  static Backends backends{{"gloo", comm::make_gloo}, {"nccl", comm::make_nccl}, {"mpi", comm::make_mpi}};
  return backends;
}

comm::MakeBackend find_backend(const std::string& name) {
  for (const auto& [known, make] : backends()) {
    if (name == known && make != nullptr) return make;
  }
  fail(ErrorCode::unsupported, "init process group: this LibTorch has no backend '{}', expected one of: {}",
       printable(name), fmt::join(available_backends(), ", "));
}

}  // namespace

std::vector<std::string> available_backends() {
  std::vector<std::string> names;
  for (const auto& [name, make] : backends()) {
    if (make != nullptr) names.push_back(name);
  }
  return names;
}

void comm::register_backend(const std::string& name, MakeBackend make) { backends().emplace_back(name, make); }

comm::Transports comm::make_transports(const std::string& name, const BackendOptions& options,
                                       FunctionRef<std::string()> failure) {
  const MakeBackend make = find_backend(name);
  // Gloo and MPI end by themselves after the timeout.
  const auto make_in_thread = [&](MakeBackend make_backend, const BackendOptions& with,
                                  std::optional<std::chrono::milliseconds> limit = {}) {
    return run_unless(failure, limit, [make_backend, with] { return make_backend(with); });
  };
  if (make == make_gloo) {
    const Transport transport = make_in_thread(make, options);
    return {transport, transport, transport, transport};
  }
  BackendOptions beside = options;
  beside.store = with_prefix("cpu", options.store);
  const Transport gloo = make_in_thread(make_gloo, beside);  // first: it finds out whether all ranks are there
  // The thread that initializes MPI is its main thread.
  const Transport transport = make == make_mpi ? make(options) : make_in_thread(make, options, options.timeout);
  return {gloo, transport.is_on_stream ? gloo : transport, transport, gloo};
}

std::string comm::backend_of_subgroups(const std::string& name) { return name == "mpi" ? "gloo" : name; }

void comm::close(Transports transports, FunctionRef<bool()> has_failed) {
  const auto after_close = transports.accelerator.after_close;
  std::promise<void> closed;
  const std::future<void> is_closed = closed.get_future();
  std::thread([backends = std::move(transports), promise = std::move(closed)]() mutable {
    backends = {};
    promise.set_value();
  }).detach();
  while (!has_failed()) {
    if (is_closed.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready) continue;
    if (after_close != nullptr) after_close();
    return;
  }
}

}  // namespace tessera
