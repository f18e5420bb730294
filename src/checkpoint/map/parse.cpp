// Parses a map's JSON. docs/formats/tensor_map.md is its reference.

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/map/rules.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/format/internal/json_structure.h"

namespace tessera::checkpoint {
namespace {

using MapJson = nlohmann::ordered_json;

constexpr std::size_t kMaxMapNesting = 64;  // of lists and objects; a parser's values are written recursively
constexpr std::size_t kMaxRules = 10'000;
constexpr std::size_t kMaxMapDims = 64;  // PyTorch's limit on dimensions
constexpr std::int64_t kMapVersion = 1;

struct OpFields {
  MapOp op;
  std::string_view name;
  std::vector<std::string_view> required, optional;
};

const std::vector<OpFields>& op_table() {
  static const std::vector<OpFields> table = {
      {MapOp::rename, "rename", {"match", "to"}, {}},
      {MapOp::substitute, "substitute", {"match", "to"}, {"all"}},
      {MapOp::drop, "drop", {"match"}, {}},
      {MapOp::copy, "copy", {"match", "to"}, {"unless_exists"}},
      {MapOp::cast, "cast", {"match", "dtype"}, {"from"}},
      {MapOp::transpose, "transpose", {"match", "dims"}, {}},
      {MapOp::permute, "permute", {"match", "dims"}, {}},
      {MapOp::reshape, "reshape", {"match", "shape"}, {"from"}},
      {MapOp::unflatten, "unflatten", {"match", "dim", "sizes"}, {}},
      {MapOp::flatten, "flatten", {"match", "dims"}, {"sizes"}},
      {MapOp::split, "split", {"match", "dim", "to"}, {"sizes"}},
      {MapOp::concat, "concat", {"match", "dim", "to"}, {"sizes"}},
      {MapOp::stack, "stack", {"match", "index", "to"}, {"count"}},
      {MapOp::unstack, "unstack", {"match", "to"}, {"count"}},
  };
  return table;
}

std::string shown(const MapJson& json) {
  return printable(json.dump(-1, ' ', false, MapJson::error_handler_t::replace), 60);
}

std::string listed(const std::vector<std::string_view>& names) {
  std::string text;
  for (const std::string_view name : names) text += fmt::format("{}{}", text.empty() ? "" : ", ", name);
  return text;
}

// A JSON object with the place that messages name.
class MapObject {
 public:
  MapObject(const MapJson& json, std::string where) : json_(json), where_(std::move(where)) {
    if (!json.is_object()) fail(ErrorCode::invalid_argument, "{}: found {}, expected an object", where_, shown(json));
  }

  template <typename F>
  auto in_key(std::string_view key, const F& f) const {
    return with_context([&] { return fmt::format("{}: key '{}'", where_, printable(key)); }, f);
  }

  [[noreturn]] void mismatch(std::string_view key, const MapJson& found, std::string_view expected) const {
    fail(ErrorCode::invalid_argument, "{}: key '{}': found {}, expected {}", where_, printable(key), shown(found),
         expected);
  }

  void allow_only(const std::vector<std::string_view>& keys) const {
    for (const auto& [key, value] : json_.items()) {
      if (std::ranges::find(keys, key) != keys.end()) continue;
      fail(ErrorCode::invalid_argument, "{}: found key '{}', expected one of {}", where_, printable(key), listed(keys));
    }
  }

  bool has(std::string_view key) const { return json_.contains(key); }
  const MapJson& at(std::string_view key, std::string_view expected) const {
    const auto found = json_.find(key);
    if (found == json_.end()) {
      fail(ErrorCode::invalid_argument, "{}: found no key '{}', expected {}", where_, key, expected);
    }
    return *found;
  }

  std::string text(std::string_view key) const { return text_of(key, at(key, "a string")); }
  std::string text_of(std::string_view key, const MapJson& value) const {
    if (!value.is_string()) mismatch(key, value, "a string");
    return value.get<std::string>();
  }
  std::vector<std::string> texts(std::string_view key, std::size_t least) const {
    const MapJson& value = at(key, "a list of strings");
    if (!value.is_array() || value.size() < least)
      mismatch(key, value, fmt::format("a list of {} or more strings", least));
    std::vector<std::string> result;
    for (const MapJson& one : value) result.push_back(text_of(key, one));
    return result;
  }
  std::int64_t integer(std::string_view key) const { return integer_of(key, at(key, "an integer")); }
  std::int64_t integer_of(std::string_view key, const MapJson& value) const {
    const bool too_large = value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX;
    if (!value.is_number_integer() || too_large) mismatch(key, value, "an integer");
    return value.get<std::int64_t>();
  }
  bool flag(std::string_view key) const {
    if (!has(key)) return false;
    const MapJson& value = at(key, "true or false");
    if (!value.is_boolean()) mismatch(key, value, "true or false");
    return value.get<bool>();
  }
  Expression expression(std::string_view key, const MapJson& value) const {
    if (value.is_string()) return in_key(key, [&] { return Expression(value.get<std::string>()); });
    if (!value.is_number_integer()) mismatch(key, value, "an integer or an expression");
    return Expression(integer_of(key, value));
  }
  std::vector<Expression> expressions(std::string_view key, std::size_t least) const {
    const std::string expected = fmt::format("a list of {} to {} integers or expressions", least, kMaxMapDims);
    const MapJson& value = at(key, expected);
    if (!value.is_array() || value.size() < least || value.size() > kMaxMapDims) mismatch(key, value, expected);
    std::vector<Expression> result;
    for (const MapJson& one : value) result.push_back(expression(key, one));
    return result;
  }

  const MapJson& json() const { return json_; }

 private:
  const MapJson& json_;
  std::string where_;
};

DType map_dtype(const MapObject& object, std::string_view key) {
  const std::string name = object.text(key);
  const auto dtype = find_dtype(name);
  if (!dtype) object.mismatch(key, name, "a dtype of PyTorch, such as bfloat16");
  return *dtype;
}

// Reads one rule.
class RuleParser {
 public:
  RuleParser(const MapObject& json, const OpFields& fields) : json_(json), fields_(fields) {
    rule_.op = fields.op;
    rule_.optional = json.flag("optional");
    rule_.unless_exists = json.flag("unless_exists");
  }

  MapRule parse() {
    read_patterns();
    if (rule_.op == MapOp::substitute) {
      rule_.replacement = json_.text("to");
      rule_.all = json_.flag("all");
      json_.in_key("to", [&] { rule_.match[0].check_replacement(rule_.replacement); });
    } else if (has_to_read("to")) {
      read_templates();
    }
    read_dims();
    if (has_to_read("sizes")) rule_.sizes = json_.expressions("sizes", 1);
    if (has_to_read("shape")) rule_.sizes = json_.expressions("shape", 0);
    if (rule_.op == MapOp::reshape && json_.has("from")) rule_.from = json_.expressions("from", 0);
    if (rule_.op == MapOp::cast) {
      rule_.dtype = map_dtype(json_, "dtype");
      if (json_.has("from")) rule_.from_dtype = map_dtype(json_, "from");
    }
    if (json_.has("count")) rule_.count = json_.expression("count", json_.at("count", ""));
    check_parts();
    return std::move(rule_);
  }

 private:
  // Whether the rule has the key or must have it; reading it is then an error if it is not there.
  bool has_to_read(std::string_view key) const {
    return json_.has(key) || std::ranges::find(fields_.required, key) != fields_.required.end();
  }

  void read_patterns() {
    std::vector<std::string> texts;
    if (rule_.op == MapOp::concat) {
      texts = json_.texts("match", 2);
    } else {
      texts.push_back(json_.text("match"));
    }
    for (std::string& text : texts) {
      rule_.match.push_back(json_.in_key("match", [&] { return Pattern(std::move(text)); }));
      const std::size_t groups = rule_.match.back().groups(), expected = rule_.match.front().groups();
      if (groups != expected) {
        json_.mismatch("match", json_.at("match", ""),
                       fmt::format("{} groups in each pattern, as in the first", expected));
      }
    }
  }

  void read_templates() {
    std::vector<std::string> texts;
    if (rule_.op == MapOp::split) {
      texts = json_.texts("to", 2);
    } else {
      texts.push_back(json_.text("to"));
    }
    for (std::string& text : texts) {
      if (text.empty()) json_.mismatch("to", text, "a name");
      rule_.to.push_back(json_.in_key(
          "to", [&] { return NameTemplate(std::move(text), rule_.match[0].groups(), rule_.op == MapOp::unstack); }));
    }
  }

  void read_dims() {
    if (has_to_read("dim")) rule_.dims.push_back(json_.integer("dim"));
    if (has_to_read("dims")) {
      const bool pair = rule_.op != MapOp::permute;
      const std::string_view expected = pair ? "a list of two integers" : "a list of integers";
      const MapJson& value = json_.at("dims", expected);
      if (!value.is_array() || value.size() > kMaxMapDims || (pair && value.size() != 2)) {
        json_.mismatch("dims", value, expected);
      }
      for (const MapJson& one : value) rule_.dims.push_back(json_.integer_of("dims", one));
    }
    if (rule_.op == MapOp::stack) {
      const std::int64_t index = json_.integer("index");
      const auto groups = static_cast<std::int64_t>(rule_.match[0].groups());
      if (index < 1 || index > groups) {
        json_.mismatch("index", index, fmt::format("the number of a group of the pattern, 1 to {}", groups));
      }
      rule_.index = static_cast<std::size_t>(index);
    }
  }

  void check_parts() const {
    const std::size_t parts = std::max(rule_.match.size(), rule_.to.size());
    const bool has_parts = rule_.op == MapOp::split || rule_.op == MapOp::concat;
    if (has_parts && rule_.sizes && rule_.sizes->size() != parts) {
      json_.mismatch("sizes", json_.at("sizes", ""), fmt::format("a size for each of {} parts", parts));
    }
  }

  const MapObject& json_;
  const OpFields& fields_;
  MapRule rule_;
};

MapRule parse_rule(const MapJson& json, const std::string& map, std::size_t number) {
  const MapObject object(json, fmt::format("{}: rule {}", map, number));
  const std::string name = object.text("op");
  const auto& table = op_table();
  const auto fields = std::ranges::find(table, name, &OpFields::name);
  if (fields == table.end()) {
    std::vector<std::string_view> names;
    names.reserve(table.size());
    for (const OpFields& known : table) names.push_back(known.name);
    object.mismatch("op", name, fmt::format("one of {}", listed(names)));
  }
  const MapObject named(json, fmt::format("{}: rule {} ({})", map, number, name));
  std::vector<std::string_view> keys = fields->required;
  keys.insert(keys.end(), fields->optional.begin(), fields->optional.end());
  keys.insert(keys.end(), {"op", "optional", "comment"});
  named.allow_only(keys);
  MapRule rule = RuleParser(named, *fields).parse();
  rule.number = number;
  return rule;
}

// Throws the error of a text that is not JSON.
[[noreturn]] void fail_as_no_json(std::string_view text, const std::string& name) {
  try {
    const auto parsed = nlohmann::json::parse(text);  // which does not search an object for each member, as MapJson
    fail(ErrorCode::internal, "{}: found a JSON {}, expected an error of the text", name, parsed.type_name());
  } catch (const nlohmann::json::exception& error) {
    const auto* of_text = dynamic_cast<const nlohmann::json::parse_error*>(&error);  // others are of a number
    std::string_view reason = error.what();
    if (const std::size_t end = reason.find("] "); reason.starts_with('[') && end != std::string_view::npos) {
      reason.remove_prefix(end + 2);
    }
    if (of_text == nullptr)
      fail(ErrorCode::invalid_argument, "{}: {}, expected finite numbers", name, printable(reason));
    fail(ErrorCode::invalid_argument, "{} at byte {}: this is not JSON, expected a JSON object: {}", name,
         of_text->byte, printable(reason));
  }
}

// Returns a JSON text as a value. Refuses deep nesting, and keys that occur twice, of which a parser would take one.
MapJson parse_json(std::string_view text, const std::string& name) {
  if (text.size() > TensorMap::kMaxBytes) {
    fail(ErrorCode::invalid_argument, "{}: {} bytes, expected at most {}", name, text.size(), TensorMap::kMaxBytes);
  }
  const json::Structure structure = json::structure_of(text);
  if (structure.depth > kMaxMapNesting) {
    fail(ErrorCode::invalid_argument, "{}: {} levels of nesting, expected at most {}", name, structure.depth,
         kMaxMapNesting);
  }
  json::OrderedJson parsed = json::parse_ordered(text);
  if (parsed.value.is_discarded()) fail_as_no_json(text, name);
  if (parsed.structure.duplicate_key) {
    fail(ErrorCode::invalid_argument, "{}: the key '{}' occurs twice, expected unique keys", name,
         printable(*parsed.structure.duplicate_key));
  }
  return std::move(parsed.value);
}

// The values of a map's parameters.
class ParameterReader {
 public:
  ParameterReader(std::string map, const TensorMap::Parameters& set, std::string_view config)
      : map_(std::move(map)), set_(set) {
    if (config.empty()) return;
    config_ = parse_json(config, "config.json");
    if (!config_.is_object()) return;
    for (const auto& [key, value] : config_.items()) values_of_config_.emplace(key, &value);
  }

  TensorMap::Parameters read(const MapObject& declared) {
    for (const auto& [name, value] : declared.json().items()) {
      if (const auto found = set_.find(name); found != set_.end()) {
        values_[name] = found->second;
      } else if (const auto known = value_of(declared, name, value)) {
        values_[name] = *known;
      } else {
        fail(ErrorCode::invalid_argument, "{0}: the parameter '{1}' has no value, expected an integer; set it: {1}=N",
             map_, printable(name));
      }
    }
    for (const auto& [name, value] : set_) {
      if (values_.contains(name)) continue;
      std::vector<std::string_view> names;
      for (const auto& [known, unused] : values_) names.push_back(known);
      fail(ErrorCode::invalid_argument, "{}: found a value for the parameter '{}', expected {}", map_, printable(name),
           names.empty() ? "none: the map has no parameters" : "one of " + listed(names));
    }
    return std::move(values_);
  }

 private:
  std::optional<std::int64_t> value_of(const MapObject& declared, const std::string& name, const MapJson& value) const {
    if (value.is_null()) return std::nullopt;
    if (!value.is_object()) return evaluated(declared, name, value);
    const MapObject source(value, fmt::format("{}: parameter '{}'", map_, printable(name)));
    source.allow_only({"default", "config", "comment"});
    if (source.has("config") && !config_.is_null()) {
      const MapObject config(config_, "config.json");
      const std::string key = source.text("config");
      const auto found = values_of_config_.find(key);
      if (found != values_of_config_.end() && !found->second->is_null()) return config.integer_of(key, *found->second);
    }
    if (!source.has("default") || source.at("default", "").is_null()) return std::nullopt;
    return evaluated(source, "default", source.at("default", ""));
  }

  std::optional<std::int64_t> evaluated(const MapObject& object, const std::string& key, const MapJson& value) const {
    const Expression expression = object.expression(key, value);
    return object.in_key(key, [&] {
      return expression.value([&](std::string_view other) -> std::optional<std::int64_t> {
        const auto found = values_.find(std::string(other));
        return found == values_.end() ? std::nullopt : std::optional(found->second);
      });
    });
  }

  std::string map_;
  const TensorMap::Parameters& set_;
  MapJson config_;
  TextMap<const MapJson*> values_of_config_;  // a value of MapJson is found in time linear in the others
  TensorMap::Parameters values_;
};

}  // namespace

std::string_view map_op_name(MapOp op) { return std::ranges::find(op_table(), op, &OpFields::op)->name; }

std::string MapStage::where(const MapRule& rule) const {
  return fmt::format("{}: rule {} ({})", name, rule.number, map_op_name(rule.op));
}

MapStage parse_map_stage(std::string_view text, const std::string& name, const TensorMap::Parameters& set,
                         std::string_view config) {
  const MapJson json = parse_json(text, name);
  const MapObject map(json, name);
  map.allow_only({"tessera_map", "description", "parameters", "unmatched", "rules", "$schema"});
  if (const std::int64_t version = map.integer("tessera_map"); version != kMapVersion) {
    map.mismatch("tessera_map", version, fmt::format("{}, the version of the format", kMapVersion));
  }
  MapStage stage;
  stage.name = name;
  if (map.has("unmatched")) {
    const std::string unmatched = map.text("unmatched");
    constexpr std::array<std::string_view, 3> kNames = {"error", "keep", "drop"};
    const auto found = std::ranges::find(kNames, unmatched);
    if (found == kNames.end()) map.mismatch("unmatched", unmatched, "error, keep or drop");
    stage.unmatched = static_cast<Unmatched>(found - kNames.begin());
  }
  const MapJson none = MapJson::object();
  const MapObject parameters(map.has("parameters") ? map.at("parameters", "") : none, name + ": parameters");
  stage.parameters = ParameterReader(name, set, config).read(parameters);
  const MapJson& rules = map.at("rules", "a list of rules");
  if (!rules.is_array() || rules.size() > kMaxRules) {
    map.mismatch("rules", rules, fmt::format("a list of up to {} rules", kMaxRules));
  }
  for (const MapJson& rule : rules) stage.rules.push_back(parse_rule(rule, name, stage.rules.size() + 1));
  return stage;
}

MapStage substitution_stage(const std::string& name, std::string pattern, std::string replacement, bool all) {
  MapStage stage;
  stage.name = name;
  stage.unmatched = Unmatched::keep;
  MapRule rule;
  rule.number = 1;
  rule.op = MapOp::substitute;
  rule.match.emplace_back(std::move(pattern));
  rule.match[0].check_replacement(replacement);
  rule.replacement = std::move(replacement);
  rule.all = all;
  stage.rules.push_back(std::move(rule));
  return stage;
}

}  // namespace tessera::checkpoint
