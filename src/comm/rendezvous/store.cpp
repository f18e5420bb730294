#include "comm/rendezvous/store.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/exceptions.h"
#include "tessera/base/error.h"

namespace tessera::comm {

namespace {

StorePtr make_tcp_store(const std::string& host, std::uint16_t port, bool is_server,
                        std::chrono::milliseconds timeout) {
  ::c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = is_server;
  options.waitWorkers = false;
  options.timeout = timeout;
  without_libuv(options);
  return c10::make_intrusive<::c10d::TCPStore>(host, options);
}

}  // namespace

StorePtr connect_store(const std::string& host, std::uint16_t port, int rank, std::chrono::milliseconds timeout) {
  try {
    return make_tcp_store(host, port, rank == 0, timeout);
  } catch (...) {
    const std::string why = message_of(std::current_exception());
    if (rank == 0) {
      fail(ErrorCode::io, "init process group: rank 0 cannot run the store at {}:{}: {}", host, port, why);
    }
    fail(ErrorCode::rank_failure,
         "init process group: rank {} could not reach rank 0's store at {}:{} within {} ms: {}", rank, host, port,
         timeout.count(), why);
  }
}

StorePtr reconnect_store(const std::string& host, std::uint16_t port, std::chrono::milliseconds timeout) {
  return make_tcp_store(host, port, false, timeout);
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
