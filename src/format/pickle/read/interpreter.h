#pragma once
// Reads one pickle. The loop (reader.cpp) keeps the cursor and the top of the stack in registers and handles frequent
// opcodes itself. Members handle the others (rare_opcodes.cpp); the loop passes both to them in `cursor_` and `top_`.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "format/pickle/nodes.h"
#include "format/pickle/read/machine.h"
#include "format/pickle/read/records.h"
#include "tessera/format/pickle_reader.h"

namespace tessera::pickle {

class Interpreter {
 public:
  // `taker` may be null.
  Interpreter(Nodes& nodes, Input input, const ReadLimits& limits, RecordTaker* taker)
      : nodes_(nodes),
        input_(std::move(input)),
        limits_(limits),
        taker_(taker),
        record_texts_(nodes),
        depth_limit_(static_cast<Depth>(std::min<std::size_t>(limits.depth, std::numeric_limits<Depth>::max() - 1))) {}

  // Returns the value. Sets `length_bytes` to the number of bytes read, including STOP.
  NodeRef read(std::uint64_t& length_bytes) {
    try {
      return run(length_bytes);
    } catch (const Nodes::Full&) {
      fail("needs more memory than the limit, expected at most {} bytes", nodes_.limit_bytes());
    }
  }

 private:
  NodeRef run(std::uint64_t& length_bytes);
  void run_rare(std::uint8_t opcode);
  void run_text(std::uint8_t opcode);

  template <typename... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    input_.fail(ErrorCode::corrupt, opcode_, format, std::forward<Args>(args)...);
  }
  [[noreturn]] void fail_underflow(std::size_t wanted) const {
    fail("{} objects on the stack, expected at least {}", top_ - floor_, wanted);
  }
  [[noreturn]] void fail_depth() const {
    fail("nests deeper than the limit, expected at most {} levels", depth_limit_);
  }

  // The stack.
  void grow_stack();
  void set_floor() { floor_ = values_.data() + (marks_.empty() ? 0 : marks_.back()); }
  void need(std::size_t count) const {
    if (static_cast<std::size_t>(top_ - floor_) < count) fail_underflow(count);
  }
  Depth* depths() const { return depths_.data() + (top_ - values_.data()); }
  void push(NodeRef value, Depth depth) {
    *depths() = depth;
    *top_++ = value;
  }
  // Returns the depth of a container of the `count` topmost values.
  Depth depth_around(const Depth* first, std::size_t count) const {
    Depth depth = 0;
    for (std::size_t i = 0; i < count; ++i) depth = std::max(depth, first[i]);
    if (depth >= depth_limit_) fail_depth();
    return static_cast<Depth>(depth + 1);
  }
  void replace(std::size_t count, NodeRef value) {
    const Depth depth = depth_around(depths() - count, count);
    top_ -= count;
    push(value, depth);
  }
  // Removes the topmost mark and returns the number of values above it.
  std::size_t pop_mark() {
    if (marks_.empty()) fail("no mark on the stack, expected one");
    const auto count = static_cast<std::size_t>(top_ - floor_);
    marks_.pop_back();
    set_floor();
    return count;
  }

  // The opcodes that modify the object below `count` values.
  void append(std::size_t count);
  void set_items(std::size_t count);
  void add_items(std::size_t count);
  void build();
  void pop();
  void call(Object::Made made);
  void put(std::uint64_t index);
  void get(std::uint64_t index);
  void push_text(Kind kind, ByteView bytes);
  void push_string(ByteView utf8);
  void push_byte_string(ByteView bytes);
  void push_integer(ByteView two_complement);
  void push_global(std::string_view module, std::string_view name);
  void push_instance(NodeRef callable, std::size_t count, std::size_t replaced);
  void push_extension(std::uint32_t code);
  ByteView take(std::uint64_t size) { return input_.take(opcode_, cursor_, size); }
  template <typename T>
  T number() {
    return input_.number<T>(opcode_, cursor_);
  }
  std::string_view line() { return input_.line(opcode_, cursor_); }
  std::uint64_t line_number();
  std::string_view utf8_line();

  Nodes& nodes_;
  Input input_;
  const ReadLimits& limits_;
  RecordTaker* taker_;
  RecordTexts record_texts_;
  Depth depth_limit_;
  Memo memo_;
  FlatArray<NodeRef> values_;
  FlatArray<Depth> depths_;
  std::vector<std::size_t> marks_;
  const std::uint8_t* opcode_ = nullptr;
  const std::uint8_t* cursor_ = nullptr;
  NodeRef* top_ = nullptr;
  NodeRef* floor_ = nullptr;  // the bottom of the accessible stack: the topmost mark
  int protocol_ = 0;
};

}  // namespace tessera::pickle
