#include "format/pickle/read/machine.h"

#include <algorithm>
#include <cstring>

namespace tessera::pickle {

Input::Input(const ByteSource& source)
    : window_(std::min<std::uint64_t>(kWindowBytes, source.size_bytes())),
      source_(&source),
      begin_(window_.data()),
      end_(begin_ + window_.size()),
      name_(source.name()),
      base_offset_bytes_(0),
      behind_window_(source.size_bytes() - window_.size()) {
  source.read_at(0, window_);
}

const std::uint8_t* Input::move_window(const std::uint8_t* at) {
  const auto kept = static_cast<std::size_t>(end_ - at);
  const auto more = static_cast<std::size_t>(std::min<std::uint64_t>(window_.size() - kept, behind_window_));
  before_window_ = offset_of(at);
  std::memmove(window_.data(), at, kept);
  source_->read_at(before_window_ + kept, MutableByteView(window_).subspan(kept, more));
  behind_window_ -= more;
  end_ = begin_ + kept + more;
  return begin_;
}

void Input::fail_with(ErrorCode code, const std::uint8_t* opcode, const std::string& problem) const {
  const std::uint64_t offset = base_offset_bytes_ + offset_of(opcode);
  const std::string what = opcode < end_ ? opcode_name(*opcode) : "end of the bytes";
  tessera::fail(code, "read pickle {}: {} at byte {}: {}", name_, what, offset, problem);
}

void Input::fail_truncated(const std::uint8_t* opcode, const std::uint8_t* at, std::uint64_t wanted) const {
  fail(ErrorCode::corrupt, opcode, "truncated: {} bytes left, expected {}", end_ - at, wanted);
}

std::string_view Input::line(const std::uint8_t* opcode, const std::uint8_t*& at) const {
  const auto left = static_cast<std::size_t>(end_ - at);
  const void* newline = left == 0 ? nullptr : std::memchr(at, '\n', left);
  if (newline == nullptr)
    fail(ErrorCode::corrupt, opcode, "truncated: no line break in the {} bytes left, expected one", left);
  const std::string_view result(reinterpret_cast<const char*>(at),
                                static_cast<std::size_t>(static_cast<const std::uint8_t*>(newline) - at));
  at += result.size() + 1;
  return result;
}

Memo::Entry* Memo::find(std::uint64_t index) const {
  if (const auto other = others_.find(index); other != others_.end()) return const_cast<Entry*>(&other->second);
  Entry* const end = entries_.data() + count_;
  Entry* const entry = std::lower_bound(entries_.data(), end, index,
                                        [](const Entry& e, std::uint64_t wanted) { return e.index < wanted; });
  if (entry == end || entry->index != index) return nullptr;
  recent_[index % recent_.size()] = {index, static_cast<std::size_t>(entry - entries_.data())};
  return entry;
}

void Memo::put(std::uint64_t index, NodeRef value, Depth depth) {
  if (index == next_ && others_.empty()) return append(value, depth);
  const Entry put{value, index & kIndexMask, depth};
  if (Entry* entry = find(index)) {
    *entry = put;
  } else {
    others_.emplace(index, put);
    ++next_;
  }
}

}  // namespace tessera::pickle
