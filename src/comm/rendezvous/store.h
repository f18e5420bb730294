#pragma once
// The stores through which ranks find each other.

#include <chrono>
#include <cstdint>
#include <string>

#include "comm/c10d.h"

namespace tessera::comm {

// How to reach the store, which rank 0 runs, or torchrun's agent.
struct StoreAddress {
  std::string host;
  std::uint16_t port = 0;
  int rank = 0;                          // of this process
  std::chrono::milliseconds timeout{0};  // to connect, and to wait for a key
  std::chrono::milliseconds answer{0};   // within which the store answers any other call
  bool is_agents = false;

  bool is_ours() const { return rank == 0 && !is_agents; }
  const char* keeper() const { return is_agents ? "torchrun's agent" : "rank 0"; }
};

// Connects to the store. Throws Error(io) if rank 0 cannot run it, and Error(rank_failure) on other ranks if they
// cannot reach it within the timeout or if something else answers, or nothing.
StorePtr connect_store(const StoreAddress& address);
// Opens another connection for another thread. The rank must have called connect_store. Throws Error(rank_failure).
StorePtr reconnect_store(const StoreAddress& address);

StorePtr make_local_store();
StorePtr with_prefix(const std::string& prefix, const StorePtr& store);

void put_text(::c10d::Store& store, const std::string& key, const std::string& text);
// Returns an empty string if there is no such key.
std::string get_text(::c10d::Store& store, const std::string& key);

}  // namespace tessera::comm
