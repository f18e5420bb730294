#include "format/pickle/read/records.h"

#include <functional>
#include <string_view>

#include "format/pickle/integer.h"
#include "tessera/format/internal/pickle_text.h"

namespace tessera::pickle {

NodeRef RecordTexts::string(ByteView utf8) {
  constexpr std::size_t kRecent = std::size_t{1} << 14;
  if (recent_.empty()) recent_.resize(kRecent);
  const std::string_view text = as_text(utf8);
  NodeRef& recent = recent_[std::hash<std::string_view>()(text) % kRecent];
  if (recent.is_string(text)) return recent;
  if (!is_python_utf8(text)) return NodeRef();
  recent = nodes_.text(Kind::string, utf8);
  return recent;
}

bool RecordCursor::integer(std::int64_t& value) {
  const std::size_t more = left();
  if (more >= 2 && *at_ == op::BININT1) {
    value = at_[1];
    at_ += 2;
    return true;
  }
  if (more >= 3 && *at_ == op::BININT2) {
    value = load_little_endian<std::uint16_t>(at_ + 1);
    at_ += 3;
    return true;
  }
  if (more >= 5 && *at_ == op::BININT) {
    value = static_cast<std::int32_t>(load_little_endian<std::uint32_t>(at_ + 1));
    at_ += 5;
    return true;
  }
  if (more >= 2 && *at_ == op::LONG1 && at_[1] <= 8 && more - 2 >= at_[1]) {
    value = integer_from_bytes({at_ + 2, at_[1]});
    at_ += 2 + at_[1];
    return true;
  }
  return false;
}

bool RecordCursor::string(NodeRef& value) {
  if (left() >= 2 && *at_ == op::SHORT_BINUNICODE) {
    const ByteView text(at_ + 2, std::min<std::size_t>(at_[1], left() - 2));
    if (text.size() != at_[1]) return false;
    value = texts_.string(text);
    if (value.is_none()) return false;
    at_ += 2 + text.size();
    const std::uint64_t puts_before = puts_;
    memoize();
    if (puts_ == puts_before) return true;
    if (text_) return false;
    text_ = value;
    puts_before_text_ = puts_before;
    return true;
  }
  return fetch(value) && value.is(Kind::string);
}

const std::uint8_t* RecordCursor::accept(Memo& memo) const {
  if (!text_) {
    memo.skip(puts_);
  } else {
    memo.skip(puts_before_text_);
    memo.append(*text_, 0);
    memo.skip(puts_ - puts_before_text_ - 1);
  }
  return at_;
}

}  // namespace tessera::pickle
