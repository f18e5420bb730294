#include "comm/rendezvous/store_probe.h"

#include <fmt/format.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace tessera::comm {

namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kProbePause(100);  // between two attempts
constexpr milliseconds kMargin(200);      // before the timeout, so that this error is the one that is reported

class Socket {
 public:
  explicit Socket(const addrinfo& address)
      : descriptor_(::socket(address.ai_family, address.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
    if (descriptor_ < 0) throw std::system_error(errno, std::generic_category(), "socket");
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  ~Socket() { ::close(descriptor_); }

  void connect(const addrinfo& address, Clock::time_point deadline) {
    int error = ::connect(descriptor_, address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      wait_for(POLLOUT, deadline, "no connection");
      socklen_t size = sizeof(error);
      if (::getsockopt(descriptor_, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    }
    if (error != 0) throw std::system_error(error, std::generic_category(), "connect");
  }

  // Sends a few bytes, which fit into the buffer of a new connection.
  template <std::size_t N>
  void send(const std::array<std::uint8_t, N>& bytes) {
    const ssize_t sent = ::send(descriptor_, bytes.data(), N, MSG_NOSIGNAL);
    if (sent < 0) throw std::system_error(errno, std::generic_category(), "send a query");
    if (static_cast<std::size_t>(sent) != N) throw std::runtime_error("send a query: the connection takes no bytes");
  }

  std::uint8_t receive_byte(Clock::time_point deadline) {
    wait_for(POLLIN, deadline, "no answer");
    std::uint8_t byte = 0;
    const ssize_t got = ::recv(descriptor_, &byte, 1, 0);
    if (got < 0) throw std::system_error(errno, std::generic_category(), "receive an answer");
    if (got == 0) throw std::runtime_error("the server closed the connection without an answer, expected a store");
    return byte;
  }

 private:
  void wait_for(short event, Clock::time_point deadline, const char* otherwise) const {
    const Clock::time_point begin = Clock::now();
    pollfd poll{descriptor_, event, 0};
    for (;;) {
      const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
      const int ready = ::poll(&poll, 1, static_cast<int>(std::clamp<milliseconds::rep>(left.count(), 0, 1 << 30)));
      if (ready > 0) return;
      if (ready < 0 && errno != EINTR) throw std::system_error(errno, std::generic_category(), "poll");
      if (ready == 0) {
        const auto waited = std::chrono::round<milliseconds>(Clock::now() - begin);
        throw std::runtime_error(fmt::format("{} within {} ms", otherwise, waited.count()));
      }
    }
  }

  int descriptor_;
};

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses addresses_of(const std::string& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), fmt::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    throw std::runtime_error(
        fmt::format("resolve the host: {}", error == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(error)));
  }
  return {found, &::freeaddrinfo};
}

// Asks the server whether it has all of no keys. The query is its number and the number of keys, as 8 bytes; the answer
// is a byte, 0 for yes.
void ask(const addrinfo& address, Clock::time_point deadline) {
  constexpr std::array<std::uint8_t, 9> kCheckNoKeys = {4};
  Socket socket(address);
  socket.connect(address, deadline);
  socket.send(kCheckNoKeys);
  if (const std::uint8_t answer = socket.receive_byte(deadline); answer != 0)
    throw std::runtime_error(fmt::format("the server answers with the byte {}, expected the 0 of a store", answer));
}

}  // namespace

void wait_for_store(const std::string& host, std::uint16_t port, milliseconds timeout, milliseconds answer) {
  const Clock::time_point deadline = Clock::now() + timeout - std::min(kMargin, timeout / 10);
  for (;;) {
    std::string why = "resolve the host: it has no address";
    try {
      const Addresses addresses = addresses_of(host, port);
      for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
        try {
          return ask(*address, std::min(deadline, Clock::now() + answer));
        } catch (const std::exception& error) {
          why = error.what();
        }
      }
    } catch (const std::exception& error) {
      why = error.what();
    }
    if (Clock::now() + kProbePause >= deadline) throw std::runtime_error(why);
    std::this_thread::sleep_for(kProbePause);
  }
}

}  // namespace tessera::comm
