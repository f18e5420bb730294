#pragma once
// A port for the store of a new group.

#include <cstdint>

namespace tessera {

/// Finds a TCP port of this host that is not in use. It is below the range from which the system assigns ports
/// (`net.ipv4.ip_local_port_range`). Ranks try to connect to rank 0 before it listens; a port of that range may be
/// assigned to another job meanwhile, whose Gloo accepts the first connection as that of its own rank.
/// Throws Error(io).
std::uint16_t free_port();

}  // namespace tessera
