#pragma once
/// \file
/// Writes pickles that Python loads, in protocol 2 (as torch.save does) or 4 (as in `.metadata`).
///
/// There are two levels: single opcodes, and complete inert trees (`Writer::value`). Trees keep sharing and recursion
/// through the memo, so a tree that was read is written with the same meaning. Equal input gives equal bytes.
///
/// Protocol 2 has no opcodes for bytes, sets, dotted globals and constructions with keyword arguments. There the writer
/// emits the calls that Python emits, and Python 2's module names. Its output uses only opcodes that PyTorch's
/// `weights_only` reader knows, except for values that torch.save cannot write either.

#include <cstdint>
#include <memory>
#include <string_view>

#include "tessera/base/function_ref.h"
#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

class Writer {
 public:
  /// May write another value in place of a persistent id's value; returns true if it did.
  using Persistent = FunctionRef<bool(Writer&, NodeRef id)>;

  /// Appends to `out`, starting with PROTO. `protocol` is 2 or 4.
  Writer(Bytes& out, int protocol);
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  ~Writer();

  void none();
  void boolean(bool value);
  void integer(std::int64_t value);
  void big_integer(ByteView two_complement);
  void floating(double value);
  void string(std::string_view text);
  /// Pushes one bytes object. In protocol 2, writes `_codecs.encode(text, 'latin1')` as Python does.
  void bytes(ByteView value);
  void byte_array(ByteView value);
  /// Throws `Error(unsupported)` if protocol 2 cannot represent the name because it contains a line break or more than
  /// 100 dots.
  void global(std::string_view module, std::string_view name);
  void mark();
  void tuple(std::size_t count);  ///< of the `count` topmost objects, 0 to 3; needs no mark
  void tuple_from_mark();
  void empty_list();
  void appends();  ///< appends mark, items... to the list below the mark
  void empty_dict();
  void set_items();  ///< mark, key, value, ...
  void empty_set();  ///< protocol 4 only
  void reduce();
  void new_object();
  void build();
  void persistent_id();  ///< BINPERSID for the top of the stack
  void stop();

  /// Memoizes the top of the stack and returns its index.
  std::uint32_t memoize();
  void get(std::uint32_t memo_index);

  /// Writes and memoizes a string the first time; fetches it from the memo afterwards.
  void interned_string(std::string_view text);
  /// As `interned_string`, for a global.
  void interned_global(std::string_view module, std::string_view name);

  /// Writes a value of a tree. The tree must outlive the writer, because sharing is kept across calls. BINPERSID
  /// follows the value of a persistent id whether or not `persistent` replaced it. Throws `Error(corrupt)` if the tree
  /// exceeds the limits, or if names, bytearrays and ints that share long text would be written as more than 16 MiB
  /// plus eight times the text that occurs once.
  void value(NodeRef v, Persistent persistent = nullptr, const WalkLimits& limits = {});

  int protocol() const { return protocol_; }

 private:
  struct Memo;
  struct Walk;

  template <typename T>
  void number(std::uint8_t opcode, T value);
  void sized(std::uint8_t opcode8, std::uint8_t opcode32, std::uint8_t opcode64, ByteView payload);
  void value_at(Walk& walk, NodeRef v, std::size_t depth);
  void list_at(Walk& walk, NodeRef v, std::size_t depth);
  void set_at(Walk& walk, NodeRef v, std::size_t depth);
  void tuple_at(Walk& walk, NodeRef v, std::size_t depth);
  void object_at(Walk& walk, NodeRef v, std::size_t depth);
  void append_all(Walk& walk, std::span<const NodeRef> items, std::size_t depth, std::uint8_t one,
                  std::uint8_t several);
  void set_all(Walk& walk, std::span<const Pair> pairs, std::size_t depth, std::uint8_t one, std::uint8_t several);
  void extension(std::uint64_t code);
  std::uint32_t push_global(std::string_view module, std::string_view name);
  bool is_known(NodeRef v) const;
  bool fetch(NodeRef v);
  void remember(NodeRef v);
  void charge(ByteView text);

  Bytes& out_;
  int protocol_;
  std::uint32_t next_memo_ = 0;
  std::unique_ptr<Memo> memo_;
};

}  // namespace tessera::pickle
