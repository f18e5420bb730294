#pragma once
/// \file
/// Maps from the names and shapes of one checkpoint to those that another program expects: rules that rename, drop,
/// copy, cast, permute, reshape, split, concatenate, stack and unstack tensors.
///
/// A map is applied to an open checkpoint and gives another checkpoint, a view: names, shapes, dtypes and chunks are
/// computed, and elements are read from the files of the original when they are needed. Whatever takes a checkpoint
/// (convert, reshard, diff, read_state, TensorReader) takes a view, in the same memory. docs/formats/tensor_map.md
/// describes the JSON.
///
///     const auto hf = TensorMap::read("llama-torchtitan-to-hf", {{"heads", 32}, {"kv_heads", 8}})
///                         .apply(Checkpoint::open("step-1000"));
///
/// Laws: a.then(b).apply(c) is b.apply(a.apply(c)). If m.inverse() does not throw, and no name that `m` leaves alone is
/// one that it makes, then m.inverse().apply(m.apply(c)) has the tensors of c, except those that `m` is told to drop as
/// copies.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"

namespace tessera::checkpoint {

/// A map as a value: immutable, and cheap to copy. All members are thread-safe. Patterns are matched in time linear in
/// the length of a name, whatever the pattern.
class TensorMap {
 public:
  /// Values of a map's parameters by name, such as the number of attention heads.
  using Parameters = std::map<std::string, std::int64_t>;
  /// Limit on the text of a map, and on that of a config.json.
  static constexpr std::size_t kMaxBytes = 16u << 20;

  /// Makes the map that changes nothing.
  TensorMap();

  /// Parses a map. `name` is for messages. `set` takes precedence over the values in the text. If `config` is not
  /// empty, it is the text of a model's config.json, from which parameters that name a key of it take their value.
  /// Throws `Error(invalid_argument)` naming the rule by its number from 1, the key, what was found and what was
  /// expected; also for a parameter without a value and for one in `set` that the map does not have. Throws
  /// `Error(unsupported)` if this tessera was built without RE2.
  static TensorMap parse(std::string_view json, const std::string& name, const Parameters& set = {},
                         std::string_view config = {});
  /// Parses a file, or one of tessera's own maps by its name alone: see `shipped_maps`. Throws as `parse`, and
  /// `Error(not_found)`, `Error(io)`.
  static TensorMap read(const std::string& file_or_name, const Parameters& set = {}, std::string_view config = {});
  /// Makes the map of one substitution as in sed, "s/PATTERN/REPLACEMENT/" or with the flag g, that leaves other names
  /// as they are. The character after "s" is the delimiter. Throws `Error(invalid_argument)`.
  static TensorMap substitution(std::string_view text);
  /// Returns the names of tessera's own maps, sorted.
  static std::vector<std::string> shipped_maps();

  /// Returns the map that applies this one and then `next`.
  TensorMap then(const TensorMap& next) const;
  /// Returns the map that reverts this one. Throws `Error(invalid_argument)` naming each rule that cannot be reverted,
  /// and why: it drops tensors, casts to a dtype that cannot represent all values, or does not state what the inverse
  /// needs to know.
  TensorMap inverse() const;

  /// Returns what prevents the map from being applied to `checkpoint`, one line each, without reading any tensor's
  /// data: rules that match nothing, names that no rule matches (if the map forbids them), two results of one name,
  /// shapes that do not fit. Empty if `apply` succeeds.
  std::vector<std::string> check(const std::shared_ptr<const Checkpoint>& checkpoint) const;

  /// Returns the view of `checkpoint`. Its `files()`, `kind()`, `version()` and `metadata()` are those of `checkpoint`;
  /// `stored` of a chunk states which file it mostly comes from. Throws `Error(invalid_argument)` with the first lines
  /// of `check`, if there are any.
  std::shared_ptr<const Checkpoint> apply(const std::shared_ptr<const Checkpoint>& checkpoint) const;

 private:
  struct Stages;
  explicit TensorMap(std::shared_ptr<const Stages> stages);
  std::shared_ptr<const Stages> stages_;
};

}  // namespace tessera::checkpoint
