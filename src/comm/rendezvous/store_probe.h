#pragma once
// Tests whether a store answers at an address. Needs no LibTorch.

#include <chrono>
#include <cstdint>
#include <string>

namespace tessera::comm {

// Returns after a store of LibTorch 1.13 at this address has answered a query. Until `timeout` is nearly over, tries
// again if there is no server yet, or if it does not answer within `answer`; then throws std::runtime_error with the
// reason. Resolving the host may take longer than `timeout`.
void wait_for_store(const std::string& host, std::uint16_t port, std::chrono::milliseconds timeout,
                    std::chrono::milliseconds answer);

}  // namespace tessera::comm
