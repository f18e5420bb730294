#pragma once
// The stores through which ranks find each other.

#include <chrono>
#include <cstdint>
#include <string>

#include "comm/c10d.h"

namespace tessera::comm {

// A connection to the store at `host`; rank 0 keeps it. Throws Error(io) where rank 0 can't, and Error(rank_failure)
// for others if they can't reach it within the timeout.
StorePtr connect_store(const std::string& host, std::uint16_t port, int rank, std::chrono::milliseconds timeout);
// As connect_store for a rank that has done that: a connection of its own, for another thread.
StorePtr reconnect_store(const std::string& host, std::uint16_t port, std::chrono::milliseconds timeout);

StorePtr make_local_store();
StorePtr with_prefix(const std::string& prefix, const StorePtr& store);

void put_text(::c10d::Store& store, const std::string& key, const std::string& text);
// Empty if there is none.
std::string get_text(::c10d::Store& store, const std::string& key);

}  // namespace tessera::comm
