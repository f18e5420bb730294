#include "tessera/base/internal/free_port.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <random>

#include "tessera/base/error.h"

namespace tessera {

namespace {

constexpr int kFirst = 10000, kTries = 100;

// Returns the first port that the system gives to sockets without one.
int first_given() {
  int first = 0;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> first;
  return first > 0 ? first : 32768;
}

// Binds a socket to `port`, any if 0. Returns the port, or 0 if it is in use.
std::uint16_t bind_to(std::uint16_t port) {
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0) fail(ErrorCode::io, "find a free port: {}, expected a socket", std::strerror(errno));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  const bool is_bound = ::bind(listener, generic, size) == 0 && ::getsockname(listener, generic, &size) == 0;
  const int error = errno;
  ::close(listener);
  if (!is_bound && (port == 0 || error != EADDRINUSE)) {
    fail(ErrorCode::io, "find a free port: {}, expected an address to listen at", std::strerror(error));
  }
  return is_bound ? ntohs(address.sin_port) : 0;
}

}  // namespace

std::uint16_t free_port() {
  const int end = first_given();
  if (end - kFirst < kTries) return bind_to(0);
  std::random_device random;
  std::uniform_int_distribution<int> any(kFirst, end - 1);
  for (int i = 0; i < kTries; ++i) {
    if (const std::uint16_t port = bind_to(static_cast<std::uint16_t>(any(random))); port != 0) return port;
  }
  return bind_to(0);
}

}  // namespace tessera
