#pragma once
// Compares the files of a checkpoint with its sidecar while they are read.
//
// Laws:
//   `read_at` compares each byte before it returns it, unless a block is larger than kMaxEdgeBytes (version 1 of the
//   sidecar has one block per file); a block is compared once
//   `read_scattered_at` compares the blocks that it covers completely
//   `compare_rest` compares what is left: after it, every byte that was read has been compared

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "tessera/base/cancellation.h"
#include "tessera/base/file.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/sidecar.h"

namespace tessera::checkpoint {

// Which blocks of a file were read, and which were compared. Thread-safe.
class ComparedFile {
 public:
  // Blocks up to this size are read completely if a part of them is read.
  static constexpr std::uint64_t kMaxEdgeBytes = 1u << 20;

  explicit ComparedFile(Sidecar::FileFacts facts);

  const Sidecar::FileFacts& facts() const { return facts_; }
  // Reads from `file`, which must be this file. Throws Error(corrupt) if a block differs from the sidecar.
  void read(const ByteSource& file, std::uint64_t offset_bytes, MutableByteView out, bool is_scattered);
  // Reads and compares the blocks that were read but not compared. Throws Error(cancelled) between blocks.
  void compare_rest(const ByteSource& file, const Cancellation* cancellation);
  // Returns the size of the blocks that were read but not compared.
  std::uint64_t bytes_not_compared() const;

 private:
  enum State : std::uint8_t { unread, read_in_part, compared };
  void compare(const ByteSource& file, std::size_t block, std::uint32_t found);

  Sidecar::FileFacts facts_;
  std::uint64_t id_;                                     // of no other object
  std::unique_ptr<std::atomic<std::uint8_t>[]> states_;  // of each block
};

// The files of a checkpoint that its sidecar lists. Thread-safe.
class Checksums {
 public:
  // Without a sidecar, nothing is compared.
  explicit Checksums(std::optional<Sidecar> sidecar);

  bool has_sidecar() const { return has_sidecar_; }
  // See Checkpoint.
  std::uint64_t largest_block_bytes() const;
  // Returns a source that compares what is read. Throws Error(corrupt) if the size of the file is not that of the
  // sidecar. Returns `file` if the sidecar does not list the name.
  std::shared_ptr<const ByteSource> compared(const std::string& name, std::shared_ptr<const ByteSource> file) const;
  // compare_rest() of every file. `open` must return the file, not compared.
  void compare_rest(FunctionRef<std::shared_ptr<const ByteSource>(const std::string&)> open,
                    const Cancellation* cancellation = nullptr) const;
  std::uint64_t bytes_not_compared() const;

 private:
  bool has_sidecar_;
  std::map<std::string, std::shared_ptr<ComparedFile>> files_;
};

}  // namespace tessera::checkpoint
