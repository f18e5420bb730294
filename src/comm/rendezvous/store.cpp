#include "comm/rendezvous/store.h"

#include <torch/version.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/exceptions.h"
#include "comm/rendezvous/deadline_store.h"
#include "comm/rendezvous/store_probe.h"
#include "tessera/base/error.h"

namespace tessera::comm {

namespace {

StorePtr make_tcp_store(const StoreAddress& address, bool is_server) {
  const auto make = [address, is_server]() -> StorePtr {
    if (kStoreHasCallbackThread && !is_server)
      wait_for_store(address.host, address.port, address.timeout, address.answer);
    ::c10d::TCPStoreOptions options;
    options.port = address.port;
    options.isServer = is_server;
    options.waitWorkers = false;
    options.timeout = address.timeout;
    without_libuv(options);
    return c10::make_intrusive<::c10d::TCPStore>(address.host, options);
  };
  StorePtr store = c10::make_intrusive<DeadlineStore>(make, address.timeout, address.answer);
  store->check({"tessera"});  // a server that is no store may accept connections
  return store;
}

[[noreturn]] void fail_to_reach(const StoreAddress& address) {
  if (address.is_agents) {
    fail(ErrorCode::rank_failure,
         "init process group: rank {} could not use the store of torchrun's agent at {}:{}: {}; LibTorch here is {}, "
         "expected the same major version as torchrun's PyTorch",
         address.rank, address.host, address.port, message_of(std::current_exception()), TORCH_VERSION);
  }
  fail(ErrorCode::rank_failure, "init process group: rank {} could not reach rank 0's store at {}:{} within {} ms: {}",
       address.rank, address.host, address.port, address.timeout.count(), message_of(std::current_exception()));
}

}  // namespace

StorePtr connect_store(const StoreAddress& address) {
  try {
    return make_tcp_store(address, address.is_ours());
  } catch (...) {
    if (!address.is_ours()) fail_to_reach(address);
    fail(ErrorCode::io, "init process group: rank 0 cannot run the store at {}:{}: {}", address.host, address.port,
         message_of(std::current_exception()));
  }
}

StorePtr reconnect_store(const StoreAddress& address) {
  try {
    return make_tcp_store(address, false);
  } catch (...) {
    fail_to_reach(address);
  }
}

StorePtr make_local_store() { return c10::make_intrusive<::c10d::HashStore>(); }

StorePtr with_prefix(const std::string& prefix, const StorePtr& store) {
  return c10::make_intrusive<::c10d::PrefixStore>(prefix, store);
}

void put_text(::c10d::Store& store, const std::string& key, const std::string& text) {
  store.set(key, std::vector<std::uint8_t>(text.begin(), text.end()));
}

std::string get_text(::c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return {};
  const std::vector<std::uint8_t> text = store.get(key);
  return {text.begin(), text.end()};
}

}  // namespace tessera::comm
