#pragma once
// The rules of a map, after parsing.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/map/expression.h"
#include "checkpoint/map/pattern.h"
#include "tessera/base/dtype.h"
#include "tessera/checkpoint/tensor_map.h"

namespace tessera::checkpoint {

enum class MapOp : std::uint8_t {
  rename,
  substitute,
  drop,
  copy,
  cast,
  transpose,
  permute,
  reshape,
  unflatten,
  flatten,
  split,
  concat,
  stack,
  unstack,
};
// Returns the name of an operation, as the JSON has it.
std::string_view map_op_name(MapOp op);

// Which fields an operation has is in the table of parse.cpp.
struct MapRule {
  std::size_t number = 0;  // from 1
  MapOp op = MapOp::rename;
  bool optional = false;           // it may match nothing
  std::vector<Pattern> match;      // one; of concat one for each part
  std::vector<NameTemplate> to;    // one; of split one for each part
  std::string replacement;         // of substitute
  bool all = false;                // of substitute: everywhere in a name
  bool unless_exists = false;      // of copy: only to names that are not there
  std::vector<std::int64_t> dims;  // of permute all; of transpose and flatten two; of the others one
  // Without a value if the key is not there; a list without elements is the shape of a scalar.
  std::optional<std::vector<Expression>> sizes;  // of reshape the shape
  std::optional<std::vector<Expression>> from;   // of reshape the shape before
  std::optional<DType> dtype, from_dtype;
  std::size_t index = 0;            // of stack: the group of the pattern that is the index
  std::optional<Expression> count;  // of stack and unstack
};

enum class Unmatched : std::uint8_t { error, keep, drop };

// A map as one JSON text has it.
struct MapStage {
  std::string name;  // for messages
  TensorMap::Parameters parameters;
  Unmatched unmatched = Unmatched::error;
  std::vector<MapRule> rules;

  // Returns "<name>: rule <number> (<operation>)".
  std::string where(const MapRule& rule) const;
  // Returns the value of an expression of the parameters and, if there is a shape, of its sizes d0, d1, ... Throws as
  // Expression::value.
  std::int64_t value(const Expression& expression, const std::vector<std::int64_t>* shape = nullptr) const;
  // Returns sizes that multiply to `total` if `multiplies`, or else add up to it. One of them may be -1: what is left.
  // Throws Error(invalid_argument) if they do not.
  std::vector<std::int64_t> sizes(const std::vector<Expression>& expressions, std::int64_t total, bool multiplies,
                                  const std::vector<std::int64_t>* shape = nullptr) const;
};

struct TensorMap::Stages {
  std::vector<MapStage> stages;
};

MapStage parse_map_stage(std::string_view json, const std::string& name, const TensorMap::Parameters& set,
                         std::string_view config);
// Returns a map with one rule, of which the pattern and the replacement are known.
MapStage substitution_stage(const std::string& name, std::string pattern, std::string replacement, bool all);
// Adds a line to `problems` for each rule that cannot be reverted.
MapStage inverse_stage(const MapStage& stage, std::vector<std::string>& problems);

// The view of a checkpoint, or what prevents it.
struct MapResult {
  std::vector<std::string> problems;
  std::shared_ptr<const Checkpoint> view;  // null if there are problems
};
MapResult apply_stages(const std::vector<MapStage>& stages, const std::shared_ptr<const Checkpoint>& checkpoint);

// The texts of tessera's own maps, by name.
std::optional<std::string_view> shipped_map(std::string_view name);

}  // namespace tessera::checkpoint
