#include "comm/backend/backend.h"

#include <fmt/ranges.h>

#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

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

// Makes a backend in a thread of its own, which is abandoned if there is a failure: a backend waits for other ranks as
// long as for a collective, even if they are dead.
comm::Transport make_unless(const std::function<std::string()>& failure, comm::MakeBackend make,
                            const comm::BackendOptions& options) {
  constexpr std::chrono::milliseconds kSlice(100);
  const auto promise = std::make_shared<std::promise<comm::Transport>>();
  std::future<comm::Transport> made = promise->get_future();
  std::thread([promise, make, options] {
    try {
      promise->set_value(make(options));
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }).detach();
  while (made.wait_for(kSlice) != std::future_status::ready) {
    if (const std::string why = failure(); !why.empty()) throw std::runtime_error(why);
  }
  return made.get();
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
                                       const std::function<std::string()>& failure) {
  const MakeBackend make = find_backend(name);
  if (make == make_gloo) {
    const Transport transport = make_unless(failure, make, options);
    return {transport, transport, transport};
  }
  BackendOptions beside = options;
  beside.store = with_prefix("cpu", options.store);
  const Transport gloo = make_unless(failure, make_gloo, beside);  // first: it finds out whether all ranks are there
  // The thread that initializes MPI is its main thread.
  const Transport transport = make == make_mpi ? make(options) : make_unless(failure, make, options);
  return {gloo, transport.is_on_stream ? gloo : transport, transport};
}

std::string comm::backend_of_subgroups(const std::string& name) { return name == "mpi" ? "gloo" : name; }

void comm::close(Transports transports, const std::function<bool()>& has_failed) {
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
