#include "comm/host/descriptor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "tessera/base/internal/huge_pages.h"

namespace tessera::comm {

namespace {

[[noreturn]] void throw_error(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

template <typename F>
auto retried(const F& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// Returns the address of a name that no file system has.
sockaddr_un address_of(const std::string& name, socklen_t& size_bytes) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof(address.sun_path)) throw std::runtime_error("the name of a socket is too long");
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  size_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Descriptor make_socket() {
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.is_open()) throw_error("socket");
  return socket;
}

std::size_t wait_readable(std::vector<pollfd> waited, const Patience& patience) {
  constexpr int kSliceMilliseconds = 100;
  for (int ready = 0; ready == 0;) {
    patience.check();
    if (std::chrono::steady_clock::now() - patience.begin >= patience.limit)
      throw std::runtime_error("no connection after " + std::to_string(patience.limit.count()) + " ms");
    ready = retried([&] { return ::poll(waited.data(), waited.size(), kSliceMilliseconds); });
    if (ready < 0) throw_error("poll");
  }
  const auto first = std::find_if(waited.begin(), waited.end(), [](const pollfd& one) { return one.revents != 0; });
  return static_cast<std::size_t>(first - waited.begin());
}

// Allocates pages for a part of a file. The kernel gives up and undoes all of it if a signal comes.
void reserve(const Descriptor& memory, std::size_t offset_bytes, std::size_t size_bytes) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = 0;
  do {
    error = ::posix_fallocate(memory.number(), static_cast<off_t>(offset_bytes), static_cast<off_t>(size_bytes));
  } while (error == EINTR);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) throw std::system_error(error, std::generic_category(), "posix_fallocate");
}

}  // namespace

Descriptor::~Descriptor() {
  if (is_open()) ::close(number_);
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this == &other) return *this;
  if (is_open()) ::close(number_);
  number_ = other.release();
  return *this;
}

int Descriptor::release() { return std::exchange(number_, -1); }

Descriptor make_shared_memory(std::size_t size_bytes) {
  Descriptor memory(::memfd_create("tessera", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.is_open()) throw_error("memfd_create");
  constexpr std::size_t kPieceBytes = std::size_t{64} << 20;  // signals do not wait long
  for (std::size_t offset_bytes = 0; offset_bytes < size_bytes; offset_bytes += kPieceBytes)
    reserve(memory, offset_bytes, std::min(size_bytes - offset_bytes, kPieceBytes));
  if (::fcntl(memory.number(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) throw_error("fcntl");
  return memory;
}

std::size_t page_bytes() {
  static const auto size_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return size_bytes;
}

Mapping::Mapping(const Descriptor& memory, std::size_t offset_bytes, std::size_t size_bytes, int times) {
  const std::size_t all_bytes = size_bytes * static_cast<std::size_t>(times);
  void* reserved = ::mmap(nullptr, all_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) throw_error("mmap");
  data_ = static_cast<std::uint8_t*>(reserved);
  mapped_bytes_ = all_bytes;
  for (int i = 0; i < times; ++i) {
    void* const at = data_ + size_bytes * static_cast<std::size_t>(i);
    if (::mmap(at, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory.number(),
               static_cast<off_t>(offset_bytes)) == MAP_FAILED) {
      const int error = errno;
      ::munmap(data_, mapped_bytes_);
      data_ = nullptr;
      throw std::system_error(error, std::generic_category(), "mmap");
    }
  }
  advise_huge_pages(data_, all_bytes);
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, mapped_bytes_);
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  return *this;
}

void hold_lock(const Descriptor& memory, int number) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = number;
  lock.l_len = 1;
  if (retried([&] { return ::fcntl(memory.number(), F_SETLK, &lock); }) != 0) throw_error("fcntl");
}

bool is_locked(const Descriptor& memory, int number) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = number;
  lock.l_len = 1;
  if (retried([&] { return ::fcntl(memory.number(), F_GETLK, &lock); }) != 0) throw_error("fcntl");
  return lock.l_type != F_UNLCK;
}

Descriptor listen_at(const std::string& name) {
  Descriptor socket = make_socket();
  socklen_t size_bytes = 0;
  const sockaddr_un address = address_of(name, size_bytes);
  if (::bind(socket.number(), reinterpret_cast<const sockaddr*>(&address), size_bytes) != 0) throw_error("bind");
  if (::listen(socket.number(), SOMAXCONN) != 0) throw_error("listen");
  return socket;
}

Descriptor connect_to(const std::string& name) {
  Descriptor socket = make_socket();
  socklen_t size_bytes = 0;
  const sockaddr_un address = address_of(name, size_bytes);
  if (retried([&] { return ::connect(socket.number(), reinterpret_cast<const sockaddr*>(&address), size_bytes); }) != 0)
    throw_error("connect");
  return socket;
}

Descriptor accept_from(const Descriptor& listening) {
  Descriptor socket(retried([&] { return ::accept4(listening.number(), nullptr, nullptr, SOCK_CLOEXEC); }));
  if (!socket.is_open()) throw_error("accept");
  return socket;
}

std::size_t wait_readable(const std::vector<Descriptor>& sockets, const Patience& patience) {
  std::vector<pollfd> waited;
  waited.reserve(sockets.size());
  for (const Descriptor& socket : sockets) waited.push_back({socket.number(), POLLIN, 0});
  return wait_readable(std::move(waited), patience);
}

void send_bytes(const Descriptor& socket, const void* data, std::size_t size_bytes) {
  const auto sent = retried([&] { return ::send(socket.number(), data, size_bytes, MSG_NOSIGNAL); });
  if (sent < 0) throw_error("send");
  if (static_cast<std::size_t>(sent) != size_bytes) throw std::runtime_error("send: the connection is full");
}

bool receive_bytes(const Descriptor& socket, void* data, std::size_t size_bytes) {
  const auto received = retried([&] { return ::recv(socket.number(), data, size_bytes, MSG_DONTWAIT); });
  return received >= 0 && static_cast<std::size_t>(received) == size_bytes;
}

namespace {

// A message of one byte that has room for a descriptor.
struct DescriptorMessage {
  DescriptorMessage() {
    header.msg_iov = &content;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
  }
  DescriptorMessage(const DescriptorMessage&) = delete;
  DescriptorMessage& operator=(const DescriptorMessage&) = delete;

  char byte = 0;
  iovec content{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
};

}  // namespace

void send_descriptor(const Descriptor& socket, const Descriptor& sent) {
  DescriptorMessage message;
  cmsghdr* const rights = CMSG_FIRSTHDR(&message.header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  const int number = sent.number();
  std::memcpy(CMSG_DATA(rights), &number, sizeof(number));
  if (retried([&] { return ::sendmsg(socket.number(), &message.header, MSG_NOSIGNAL); }) >= 0) return;
  const int error = errno;
  message.header.msg_control = nullptr;
  message.header.msg_controllen = 0;
  retried([&] { return ::sendmsg(socket.number(), &message.header, MSG_NOSIGNAL); });
  throw std::system_error(error, std::generic_category(), "sendmsg");
}

Descriptor receive_descriptor(const Descriptor& socket, const Patience& patience) {
  wait_readable(std::vector<pollfd>{{socket.number(), POLLIN, 0}}, patience);
  DescriptorMessage message;
  const auto received = retried([&] { return ::recvmsg(socket.number(), &message.header, MSG_CMSG_CLOEXEC); });
  if (received < 0) throw_error("recvmsg");
  const cmsghdr* const rights = received == 0 ? nullptr : CMSG_FIRSTHDR(&message.header);
  if (rights == nullptr || rights->cmsg_type != SCM_RIGHTS) throw std::runtime_error("recvmsg: found no descriptor");
  int number = -1;
  std::memcpy(&number, CMSG_DATA(rights), sizeof(number));
  return Descriptor(number);
}

}  // namespace tessera::comm
