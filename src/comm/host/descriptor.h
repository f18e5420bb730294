#pragma once
// Memory that several processes of a host share, without a name in any file system: the kernel frees it when the last
// process that has it has ended, however it ends. Linux: memfd_create.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera::comm {

// A file descriptor that is closed when this is destroyed.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  int number() const { return number_; }
  bool is_open() const { return number_ >= 0; }
  int release();

 private:
  int number_ = -1;
};

// Returns shared memory of zeros, whose size can no longer change. All of it is reserved, so that no later access
// fails. Throws std::system_error.
Descriptor make_shared_memory(std::size_t size_bytes);
// Returns the size of a page, of which offsets and sizes of mappings are multiples.
std::size_t page_bytes();

// A part of shared memory in the address space of this process.
class Mapping {
 public:
  Mapping() = default;
  // Maps `size_bytes` from `offset_bytes` on. With `times` 2 the same memory follows itself, so that what wraps around
  // at its end is contiguous. Throws std::system_error.
  Mapping(const Descriptor& memory, std::size_t offset_bytes, std::size_t size_bytes, int times = 1);
  ~Mapping();
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept;
  std::uint8_t* data() const { return data_; }

 private:
  std::uint8_t* data_ = nullptr;
  std::size_t mapped_bytes_ = 0;
};

// A rank of a process holds the lock `number` of shared memory until the process ends or closes any descriptor of this
// memory.
void hold_lock(const Descriptor& memory, int number);
// Returns whether another process holds it.
bool is_locked(const Descriptor& memory, int number);

// Connections that pass descriptors between processes of one network namespace, without any right. Functions throw
// std::system_error or std::runtime_error.

// How long to wait, in all waits that share it. `check` is called in each of them and now and then meanwhile, and
// throws to end the wait. So neither depends on what strangers send.
struct Patience {
  std::chrono::milliseconds limit;
  std::function<void()> check;
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
};

Descriptor listen_at(const std::string& name);
// Does not wait: throws if more connections wait to be accepted than the kernel allows.
Descriptor connect_to(const std::string& name);
Descriptor accept_from(const Descriptor& listening);
// Waits until one of the sockets has received something, a connection or its end, and returns its index.
std::size_t wait_readable(const std::vector<Descriptor>& sockets, const Patience& patience);
void send_bytes(const Descriptor& socket, const void* data, std::size_t size_bytes);
// Receives what one call of send_bytes sent, without waiting. Returns false if that was something else, or nothing.
bool receive_bytes(const Descriptor& socket, void* data, std::size_t size_bytes);
// If the descriptor cannot be sent to a living process, receive_descriptor throws there, too.
void send_descriptor(const Descriptor& socket, const Descriptor& sent);
Descriptor receive_descriptor(const Descriptor& socket, const Patience& patience);

}  // namespace tessera::comm
