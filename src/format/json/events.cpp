#include "format/json/events.h"

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

namespace tessera::json {
namespace {

// Iterates over text and publishes its position.
class TrackingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  TrackingIterator(const char* at, const char** seen) : at_(at), seen_(seen) {}
  const char& operator*() const { return *at_; }
  TrackingIterator& operator++() {
    *seen_ = ++at_;
    return *this;
  }
  TrackingIterator operator++(int) {
    const TrackingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const TrackingIterator& other) const { return at_ == other.at_; }

 private:
  const char* at_;
  const char** seen_;
};

// Translates the events of nlohmann's parser into ours.
class Adapter final : public Cursor {
 public:
  Adapter(ByteView text, const std::string& name, std::uint64_t base_offset, Visitor& visitor)
      : Cursor(text, name, base_offset), end_(begin_ + text.size()), visitor_(visitor) {}

  void run() {
    if (const char* zero = std::find(begin_, end_, '\0'); zero != end_) {  // the parser takes it for the end
      position_ = zero;
      corrupt("found a zero byte, expected strict JSON");
    }
    if (as_text({reinterpret_cast<const std::uint8_t*>(begin_), static_cast<std::size_t>(end_ - begin_)})
            .starts_with("\xEF\xBB\xBF")) {
      corrupt("found a byte order mark, expected JSON without one");
    }
    nlohmann::json::sax_parse(TrackingIterator(begin_, &position_), TrackingIterator(end_, &position_), this);
  }

  bool null() { return scalar({}); }
  bool boolean(bool) { return scalar({.kind = Scalar::Kind::boolean, .text = {}}); }
  bool number_integer(std::int64_t) { return scalar({.kind = Scalar::Kind::negative_integer, .text = {}}); }
  bool number_unsigned(std::uint64_t value) {
    return scalar({.kind = Scalar::Kind::unsigned_integer, .number = value, .text = {}});
  }
  bool number_float(double value, const std::string&) {
    return scalar({.kind = Scalar::Kind::floating, .real = value, .text = {}});
  }
  bool string(std::string& value) { return scalar({.kind = Scalar::Kind::string, .text = std::move(value)}); }
  bool binary(std::vector<std::uint8_t>&) { return false; }
  bool start_object(std::size_t) { return open(false); }
  bool start_array(std::size_t) { return open(true); }
  bool end_object() { return close(false); }
  bool end_array() { return close(true); }
  bool key(std::string& value) {
    if (!path_.back().keys.insert(value).second) corrupt("duplicate key '{}', expected unique keys", printable(value));
    path_.back().key = std::move(value);
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception& error) {
    std::string_view what = error.what();  // "[json.exception...] text"
    if (const std::size_t bracket = what.find("] "); bracket != what.npos) what.remove_prefix(bracket + 2);
    const std::string shown = printable(what);
    // The parser states what it expected of grammar alone.
    const bool states_expected = shown.find("; expected ") != shown.npos;
    corrupt("{}{}", shown, states_expected ? "" : ", expected strict JSON in UTF-8 with finite numbers");
  }

 private:
  bool scalar(Scalar value) {
    visitor_.scalar(*this, std::move(value));
    return advance();
  }
  bool open(bool is_array) {
    if (path_.size() >= kMaxDepth) corrupt("nested deeper than the limit, expected at most {} levels", kMaxDepth);
    visitor_.open(*this, is_array);
    path_.emplace_back();
    path_.back().is_array = is_array;
    return true;
  }
  bool close(bool is_array) {
    path_.pop_back();
    visitor_.close(*this, is_array);
    return advance();
  }
  bool advance() {
    if (!path_.empty()) ++path_.back().index;
    return true;
  }

  const char* end_;
  Visitor& visitor_;
};

}  // namespace

std::string_view scalar_kind_name(Scalar::Kind kind) {
  switch (kind) {
    case Scalar::Kind::null:
      return "null";
    case Scalar::Kind::boolean:
      return "a boolean";
    case Scalar::Kind::unsigned_integer:
      return "an integer";
    case Scalar::Kind::negative_integer:
      return "a negative integer";
    case Scalar::Kind::floating:
      return "a number with a fraction or beyond 64 bits";
    case Scalar::Kind::string:
      return "a string";
  }
  return "?";
}

void read(ByteView text, const std::string& name, std::uint64_t base_offset_bytes, Visitor& visitor) {
  Adapter(text, name, base_offset_bytes, visitor).run();
}

std::string quote(std::string_view text, std::string_view what, bool ascii_only) {
  try {
    return nlohmann::json(text).dump(-1, ' ', ascii_only);
  } catch (const nlohmann::json::exception&) {
    fail(ErrorCode::invalid_argument, "{} '{}' is not UTF-8, expected UTF-8 as JSON requires", what, printable(text));
  }
}

}  // namespace tessera::json
