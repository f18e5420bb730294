#pragma once
// The stores through which ranks find each other.

#include <chrono>
#include <cstdint>
#include <string>

#include "comm/c10d.h"

namespace tessera::comm {

// Connects to the store at `host`, which rank 0 runs. Throws Error(io) if rank 0 cannot run it, and Error(rank_failure)
// on other ranks if they cannot reach it within the timeout.
StorePtr connect_store(const std::string& host, std::uint16_t port, int rank, std::chrono::milliseconds timeout);
// Opens another connection for another thread. The rank must have called connect_store.
StorePtr reconnect_store(const std::string& host, std::uint16_t port, std::chrono::milliseconds timeout);

StorePtr make_local_store();
StorePtr with_prefix(const std::string& prefix, const StorePtr& store);

void put_text(::c10d::Store& store, const std::string& key, const std::string& text);
// Returns an empty string if there is no such key.
std::string get_text(::c10d::Store& store, const std::string& key);

}  // namespace tessera::comm
