#include "checkpoint/source/checksums.h"

#include <algorithm>
#include <utility>

#include "checkpoint/buffer.h"
#include "tessera/base/crc32.h"
#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

constexpr std::uint64_t kPieceBytes = 4u << 20;

// The last block that a thread read because it needed a part of it: other small parts of it often follow.
struct LastBlock {
  std::uint64_t file = 0;  // ComparedFile::id_, 0 for none
  std::size_t number = 0;
  Buffer buffer;
  MutableByteView bytes;
};

std::uint64_t next_id() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

class ComparedSource final : public ByteSource {
 public:
  ComparedSource(std::shared_ptr<const ByteSource> file, std::shared_ptr<ComparedFile> compared)
      : file_(std::move(file)), compared_(std::move(compared)) {}
  void read_at(std::uint64_t offset_bytes, MutableByteView out) const override {
    compared_->read(*file_, offset_bytes, out, false);
  }
  void read_scattered_at(std::uint64_t offset_bytes, MutableByteView out) const override {
    compared_->read(*file_, offset_bytes, out, true);
  }
  bool compares_every_byte() const override {
    const Sidecar::FileFacts& facts = compared_->facts();
    return facts.block_end(0) <= ComparedFile::kMaxEdgeBytes;
  }
  std::uint64_t size_bytes() const override { return compared_->facts().size_bytes; }  // which the file had when opened
  const std::string& name() const override { return file_->name(); }

 private:
  std::shared_ptr<const ByteSource> file_;
  std::shared_ptr<ComparedFile> compared_;
};

}  // namespace

ComparedFile::ComparedFile(Sidecar::FileFacts facts)
    : facts_(std::move(facts)),
      id_(next_id()),
      states_(std::make_unique<std::atomic<std::uint8_t>[]>(facts_.blocks())) {}

void ComparedFile::read(const ByteSource& file, std::uint64_t offset_bytes, MutableByteView out, bool is_scattered) {
  const std::uint64_t size = facts_.size_bytes;
  if (out.empty() || offset_bytes >= size || out.size() > size - offset_bytes) return file.read_at(offset_bytes, out);
  const std::uint64_t end = offset_bytes + out.size();
  const std::uint64_t block_bytes = facts_.block_end(0);
  thread_local LastBlock last;
  for (std::uint64_t at = offset_bytes; at < end;) {
    const auto block = static_cast<std::size_t>(at / block_bytes);
    const std::uint64_t begin = facts_.block_begin(block), block_end = facts_.block_end(block);
    const std::uint64_t part_end = std::min(end, block_end);
    const MutableByteView part = out.subspan(at - offset_bytes, part_end - at);
    std::atomic<std::uint8_t>& state = states_[block];
    if (last.file == id_ && last.number == block) {
      std::copy_n(last.bytes.data() + (at - begin), part.size(), part.data());
    } else if (state.load(std::memory_order_relaxed) == compared) {
      file.read_at(at, part);
    } else if (at == begin && part_end == block_end) {
      file.read_at(at, part);
      compare(file, block, crc32(part));
    } else if (!is_scattered && block_end - begin <= kMaxEdgeBytes) {
      last.file = 0;
      last.bytes = last.buffer.get(block_end - begin);
      file.read_at(begin, last.bytes);
      compare(file, block, crc32(last.bytes));
      last.file = id_;
      last.number = block;
      std::copy_n(last.bytes.data() + (at - begin), part.size(), part.data());
    } else {
      file.read_at(at, part);
      std::uint8_t expected = unread;
      state.compare_exchange_strong(expected, read_in_part);
    }
    at = part_end;
  }
}

void ComparedFile::compare(const ByteSource& file, std::size_t block, std::uint32_t found) {
  const std::uint64_t begin = facts_.block_begin(block), end = facts_.block_end(block);
  if (found != facts_.block_crc(block)) {
    fail(ErrorCode::corrupt, "{} at byte {}: {} bytes have CRC-32 {:08x}, expected {:08x} as in the sidecar",
         file.name(), begin, end - begin, found, facts_.block_crc(block));
  }
  states_[block].store(compared, std::memory_order_relaxed);
}

void ComparedFile::compare_rest(const ByteSource& file, const Cancellation* cancellation) {
  thread_local Buffer buffer;
  for (std::size_t block = 0; block < facts_.blocks(); ++block) {
    if (states_[block].load(std::memory_order_relaxed) != read_in_part) continue;
    std::uint32_t crc = 0;
    for (std::uint64_t at = facts_.block_begin(block); at < facts_.block_end(block);) {
      if (cancellation != nullptr) cancellation->check();
      const MutableByteView piece = buffer.get(std::min(kPieceBytes, facts_.block_end(block) - at));
      file.read_at(at, piece);
      crc = crc32(piece, crc);
      at += piece.size();
    }
    compare(file, block, crc);
  }
}

std::uint64_t ComparedFile::bytes_not_compared() const {
  std::uint64_t bytes = 0;
  for (std::size_t block = 0; block < facts_.blocks(); ++block) {
    if (states_[block].load(std::memory_order_relaxed) == read_in_part) {
      bytes += facts_.block_end(block) - facts_.block_begin(block);
    }
  }
  return bytes;
}

Checksums::Checksums(std::optional<Sidecar> sidecar) : has_sidecar_(sidecar.has_value()) {
  if (!sidecar) return;
  for (auto& [name, facts] : sidecar->files) files_[name] = std::make_shared<ComparedFile>(std::move(facts));
}

std::uint64_t Checksums::largest_block_bytes() const {
  std::uint64_t largest = 0;
  for (const auto& [name, file] : files_) largest = std::max(largest, file->facts().block_end(0));
  return largest;
}

std::shared_ptr<const ByteSource> Checksums::compared(const std::string& name,
                                                      std::shared_ptr<const ByteSource> file) const {
  const auto found = files_.find(name);
  if (found == files_.end()) return file;
  const std::uint64_t size = file->size_bytes(), expected = found->second->facts().size_bytes;
  if (size != expected) {
    fail(ErrorCode::corrupt, "{}: the file has {} bytes, expected {} as in the sidecar", file->name(), size, expected);
  }
  return std::make_shared<const ComparedSource>(std::move(file), found->second);
}

void Checksums::compare_rest(FunctionRef<std::shared_ptr<const ByteSource>(const std::string&)> open,
                             const Cancellation* cancellation) const {
  for (const auto& [name, file] : files_) {
    if (file->bytes_not_compared() > 0) file->compare_rest(*open(name), cancellation);
  }
}

std::uint64_t Checksums::bytes_not_compared() const {
  std::uint64_t bytes = 0;
  for (const auto& [name, file] : files_) bytes += file->bytes_not_compared();
  return bytes;
}

}  // namespace tessera::checkpoint
