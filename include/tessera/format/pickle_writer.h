#pragma once
/// \file
/// Writes pickles that Python loads: protocol 2 (what torch.save writes) and 4 (what `.metadata` is).
///
/// Two levels: opcodes (`Writer`), and whole inert trees (`Writer::value`) with sharing and recursion kept through the
/// memo, so that what was read comes out meaning the same. Deterministic: equal input gives equal bytes.
///
/// Protocol 2 has no opcodes for bytes, sets, dotted globals and keyword arguments of a construction; there the calls
/// are written that Python writes, and module names as Python 2 has them. Its output uses the opcodes alone that
/// PyTorch's `weights_only` reader knows, except for what torch.save could not write either.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

class Writer {
 public:
  /// May replace a persistent id's value by writing another in its place and returning true.
  using Persistent = std::function<bool(Writer&, NodeRef id)>;

  /// Appends to `out`, beginning with PROTO. `protocol` is 2 or 4.
  Writer(Bytes& out, int protocol);

  void none();
  void boolean(bool value);
  void integer(std::int64_t value);
  void big_integer(ByteView two_complement);
  void floating(double value);
  void string(std::string_view text);
  /// In protocol 2: `_codecs.encode(text, 'latin1')`, as Python does; pushes one object either way.
  void bytes(ByteView value);
  void byte_array(ByteView value);
  /// Throws `Error(unsupported)` where protocol 2 can't say the name (a line break in it).
  void global(std::string_view module, std::string_view name);
  void mark();
  void tuple(std::size_t count);  ///< for count 0..3: of the topmost objects, no mark needed
  void tuple_from_mark();
  void empty_list();
  void appends();  ///< mark, items... onto the list below the mark
  void empty_dict();
  void set_items();  ///< mark, key, value, ...
  void empty_set();  ///< protocol 4
  void reduce();
  void new_object();
  void build();
  void persistent_id();  ///< BINPERSID of the top of the stack
  void stop();

  /// Memoizes the top of the stack and returns its index.
  std::uint32_t memoize();
  void get(std::uint32_t memo_index);

  /// A string, memoized at its first writing and fetched by later ones.
  void interned_string(std::string_view text);
  /// A global, likewise.
  void interned_global(std::string_view module, std::string_view name);

  /// Writes a tree's value. Nodes are remembered for sharing between calls too, so the tree must outlive the writer.
  /// BINPERSID is written behind a persistent id's value whether `persistent` replaced it or not.
  void value(NodeRef v, const Persistent& persistent = nullptr, const WalkLimits& limits = {});

  int protocol() const { return protocol_; }

 private:
  struct TextHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  using TextMap = std::unordered_map<std::string, std::uint32_t, TextHash, std::equal_to<>>;
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
  bool fetch(NodeRef v);
  void remember(NodeRef v);

  Bytes& out_;
  int protocol_;
  std::uint32_t next_memo_ = 0;
  TextMap strings_, globals_;
  std::unordered_map<std::uint64_t, std::uint32_t> nodes_;
};

}  // namespace tessera::pickle
