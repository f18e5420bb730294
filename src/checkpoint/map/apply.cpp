// Applies the rules of a map to the names, shapes and dtypes of a checkpoint.

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "checkpoint/map/mapped_tensor.h"
#include "checkpoint/map/rules.h"
#include "checkpoint/source/mapped.h"
#include "tessera/base/cast.h"
#include "tessera/base/checked.h"
#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

constexpr std::size_t kMaxMapProblems = 1000;
constexpr std::size_t kShownNames = 5;
// A map makes at most this many tensors and objects, or as many as the checkpoint has.
constexpr std::size_t kMaxMapResults = std::size_t{1} << 20;

// A tensor or an object on its way through the rules.
struct MapItem {
  std::string name;
  std::size_t position = 0;  // in the checkpoint's order
  Path path;
  std::shared_ptr<const PathKeys> keys;  // on the path
  bool is_matched = false;               // by a rule of the stage
  std::string made_by;                   // the last rule that named it; empty if the checkpoint did
  std::optional<MappedTensor> tensor;    // empty for an object
  DType dtype = DType::float32;
  bool requires_grad = false;
  std::size_t object = 0;
};

// Returns the path of a value with a new name: items that the name still begins with, and the rest as one.
Path renamed_path(const Path& path, const std::string& name) {
  Path result;
  std::size_t at = 0;
  for (std::size_t i = 0; i + 1 < path.size(); ++i) {
    const auto* text = std::get_if<std::string>(&path[i]);
    const std::string item = (text != nullptr ? *text : std::to_string(std::get<std::int64_t>(path[i]))) + ".";
    if (name.compare(at, item.size(), item) != 0) break;
    result.push_back(path[i]);
    at += item.size();
  }
  if (result.empty()) return {};
  result.emplace_back(name.substr(at));
  return result;
}

// Returns the keys of a path that are on the first `parts` parts of it.
std::shared_ptr<const PathKeys> first_keys(const std::shared_ptr<const PathKeys>& keys, std::size_t parts) {
  if (!keys || keys->back().part < parts) return keys;
  PathKeys first = *keys;
  std::erase_if(first, [&](const PathKey& key) { return key.part >= parts; });
  return first.empty() ? nullptr : std::make_shared<const PathKeys>(std::move(first));
}

class MapApplication {
 public:
  explicit MapApplication(std::shared_ptr<const Checkpoint> checkpoint) : checkpoint_(std::move(checkpoint)) {
    for (std::size_t i = 0; i < checkpoint_->tensors().size(); ++i) {
      const TensorInfo& info = checkpoint_->tensors()[i];
      inputs_.push_back({i, {}});
      items_.push_back({info.name, info.position, info.path, info.keys, false, "", MappedTensor(info, i), info.dtype,
                        info.requires_grad, 0});
    }
    for (std::size_t i = 0; i < checkpoint_->objects().size(); ++i) {
      const ObjectInfo& info = checkpoint_->objects()[i];
      items_.push_back(
          {info.name, info.position, info.path, info.keys, false, "", std::nullopt, DType::float32, false, i});
    }
    std::ranges::stable_sort(items_, {}, &MapItem::position);
    max_items_ = std::max(items_.size(), kMaxMapResults);
  }

  void apply(const MapStage& stage) {
    if (has_too_many_problems()) return;
    stage_ = &stage;
    for (MapItem& item : items_) item.is_matched = false;
    for (const MapRule& rule : stage.rules) {
      rule_ = &rule;
      const bool matched = rule.op == MapOp::concat  ? apply_concat()
                           : rule.op == MapOp::stack ? apply_stack()
                                                     : apply_to_each();
      if (!matched && !rule.optional) {
        problem("its pattern matches no name, expected one or more; \"optional\": true allows none");
      }
      if (has_too_many_problems()) return;
    }
    rule_ = nullptr;
    finish_unmatched();
    check_names();
  }

  MapResult result() {
    MapResult result;
    result.problems = std::move(problems_);
    if (!result.problems.empty()) return result;
    std::vector<TensorInfo> tensors;
    std::vector<TensorView> views;
    std::vector<MappedObject> objects;
    std::set<std::size_t> checked;  // tensors of the checkpoint
    for (std::size_t position = 0; position < items_.size(); ++position) {
      MapItem& item = items_[position];
      if (!item.tensor) {
        objects.push_back(
            {{item.name, checkpoint_->objects()[item.object].stored, item.path, position, item.keys}, item.object});
        continue;
      }
      TensorInfo info;
      info.name = item.name;
      info.dtype = item.dtype;
      info.requires_grad = item.requires_grad;
      info.shape = item.tensor->shape();
      info.chunks = item.tensor->chunks();
      info.stored = item.tensor->stored();
      info.path = item.path;
      info.keys = item.keys;
      info.position = position;
      views.push_back(item.tensor->view());
      check_inputs(views.back(), checked);
      tensors.push_back(std::move(info));
    }
    result.view = CheckpointAccess::make(open_mapped(
        checkpoint_, std::make_unique<const ComputedTensors>(checkpoint_, std::move(inputs_), std::move(views)),
        std::move(tensors), std::move(objects)));
    return result;
  }

 private:
  // A view may have fewer chunks than its inputs, so that a hole or an overlap of those would not show.
  void check_inputs(const TensorView& view, std::set<std::size_t>& checked) const {
    if (view.is_input()) return;
    std::vector<std::size_t> numbers;
    view.add_inputs(numbers);
    for (const std::size_t number : numbers) {
      const std::size_t tensor = inputs_[number].tensor;
      if (checked.insert(tensor).second) checkpoint_->check_partition(tensor);
    }
  }

  std::string where() const { return rule_ != nullptr ? stage_->where(*rule_) : stage_->name; }
  // Then the rules end at once, and the items are not complete.
  bool has_too_many_problems() const { return problems_.size() >= kMaxMapProblems; }
  void problem(const std::string& text) { problems_.push_back(fmt::format("{}: {}", where(), text)); }

  std::string describe(const MapItem& item) const {
    return fmt::format("tensor '{}' of shape {}", printable(item.name), shape_to_string(item.tensor->shape()));
  }

  // Calls f(), and makes an error of it a problem with `item`, unless it is one of input or a cancellation. Returns
  // whether f() threw nothing.
  template <typename F>
  bool with_problems(const MapItem& item, const F& f) {
    try {
      f();
      return true;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::io || error.code() == ErrorCode::cancelled) throw;
      problem(fmt::format("{}: {}", item.tensor ? describe(item) : fmt::format("'{}'", printable(item.name)),
                          error.what()));
      return false;
    }
  }

  static void check_size(const MappedTensor& tensor, DType dtype) {
    checked_multiply(checked_numel(tensor.shape(), "its number of elements"), dtype_size(dtype), "its size");
  }

  static std::size_t dim_of(const MapItem& item, std::int64_t dim) {
    const auto rank = std::ssize(item.tensor->shape());
    if (dim < -rank || dim >= rank) {
      fail(ErrorCode::invalid_argument, "found dimension {}, expected {}", dim,
           rank == 0 ? "a tensor with dimensions" : fmt::format("{} to {}", -rank, rank - 1));
    }
    return static_cast<std::size_t>(dim < 0 ? dim + rank : dim);
  }

  std::vector<std::int64_t> parts_of(const std::vector<std::int64_t>& shape, std::size_t dim, std::size_t parts) const {
    const std::int64_t total = shape[dim];
    if (rule_->sizes) return stage_->sizes(*rule_->sizes, total, false, &shape);
    const auto count = static_cast<std::int64_t>(parts);
    if (total % count != 0) {
      fail(ErrorCode::invalid_argument, "found {} elements, expected a multiple of {} for equal parts", total, count);
    }
    return std::vector<std::int64_t>(parts, total / count);
  }

  void name_item(MapItem& item, std::string name) {
    item.made_by = where();
    if (name == item.name) return;
    item.path = renamed_path(item.path, name);
    item.keys = first_keys(item.keys, item.path.empty() ? 0 : item.path.size() - 1);
    item.name = std::move(name);
  }

  void check_count(std::size_t results) const {
    if (results <= max_items_) return;
    fail(ErrorCode::invalid_argument, "it makes {} tensors, expected at most {} in all", results, max_items_);
  }

  // Returns whether any item was matched.
  bool apply_to_each() {
    bool any = false;
    names_before_.clear();
    if (rule_->unless_exists) {
      for (const MapItem& item : items_) names_before_.insert(item.name);
    }
    std::vector<MapItem> results;
    results.reserve(items_.size());
    for (MapItem& item : items_) {
      std::optional<std::vector<std::string>> groups;
      std::optional<std::string> substituted;
      if (rule_->op == MapOp::substitute) {
        substituted = rule_->match[0].replace(item.name, rule_->replacement, rule_->all);
      } else {
        groups = rule_->match[0].match(item.name);
      }
      if (!groups && !substituted) {
        results.push_back(std::move(item));
        continue;
      }
      any = true;
      item.is_matched = true;
      const bool done = with_problems(item, [&] {
        if (groups) return change(item, *groups, results);
        if (substituted->empty()) fail(ErrorCode::invalid_argument, "nothing is left of its name, expected a name");
        name_item(item, std::move(*substituted));
        results.push_back(std::move(item));
      });
      if (!done) results.push_back(std::move(item));
      if (has_too_many_problems()) return any;
    }
    items_ = std::move(results);
    return any;
  }

  // Adds what the rule makes of an item.
  void change(MapItem& item, const std::vector<std::string>& groups, std::vector<MapItem>& results) {
    const MapOp op = rule_->op;
    if (op == MapOp::drop) return;
    if (op == MapOp::rename) {
      name_item(item, rule_->to[0].name(groups));
      results.push_back(std::move(item));
      return;
    }
    if (!item.tensor) fail(ErrorCode::invalid_argument, "it is an object, expected a tensor");
    if (op == MapOp::copy) {
      check_count(results.size() + 2);
      MapItem copy = item;
      results.push_back(std::move(item));
      name_item(copy, rule_->to[0].name(groups));
      if (!rule_->unless_exists || !names_before_.contains(copy.name)) results.push_back(std::move(copy));
      return;
    }
    if (op == MapOp::split || op == MapOp::unstack) return divide(item, groups, results);
    if (op == MapOp::cast) {
      cast_item(item);
    } else {
      item.tensor = rearranged(item);
      check_size(*item.tensor, item.dtype);
    }
    results.push_back(std::move(item));
  }

  MappedTensor rearranged(const MapItem& item) const {
    const MappedTensor& tensor = *item.tensor;
    const std::vector<std::int64_t>& shape = tensor.shape();
    const std::int64_t elements = volume(Box::full(shape));
    switch (rule_->op) {
      case MapOp::transpose: {
        std::vector<std::size_t> dims(shape.size());
        std::iota(dims.begin(), dims.end(), 0);
        std::swap(dims[dim_of(item, rule_->dims[0])], dims[dim_of(item, rule_->dims[1])]);
        return tensor.permuted(dims);
      }
      case MapOp::permute: {
        std::vector<std::size_t> dims;
        for (const std::int64_t dim : rule_->dims) dims.push_back(dim_of(item, dim));
        std::vector<std::size_t> sorted = dims;
        std::ranges::sort(sorted);
        if (dims.size() != shape.size() || std::ranges::adjacent_find(sorted) != sorted.end()) {
          fail(ErrorCode::invalid_argument, "found dimensions {}, expected each of its {} once",
               shape_to_string(rule_->dims), shape.size());
        }
        return tensor.permuted(dims);
      }
      case MapOp::reshape:
        if (rule_->from && stage_->sizes(*rule_->from, elements, true, &shape) != shape) {
          fail(ErrorCode::invalid_argument, "expected the shape {}",
               shape_to_string(stage_->sizes(*rule_->from, elements, true, &shape)));
        }
        return tensor.reshaped(stage_->sizes(*rule_->sizes, elements, true, &shape));
      case MapOp::unflatten: {
        const std::size_t dim = dim_of(item, rule_->dims[0]);
        const std::vector<std::int64_t> sizes = stage_->sizes(*rule_->sizes, shape[dim], true);
        std::vector<std::int64_t> to(shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(dim));
        to.insert(to.end(), sizes.begin(), sizes.end());
        to.insert(to.end(), shape.begin() + static_cast<std::ptrdiff_t>(dim) + 1, shape.end());
        return tensor.reshaped(to);
      }
      default:  // flatten
        return tensor.reshaped(flattened_shape(item));
    }
  }

  std::vector<std::int64_t> flattened_shape(const MapItem& item) const {
    const std::vector<std::int64_t>& shape = item.tensor->shape();
    const std::size_t first = dim_of(item, rule_->dims[0]), last = dim_of(item, rule_->dims[1]);
    if (first > last) {
      fail(ErrorCode::invalid_argument, "found dimensions {} to {}, expected an order from first to last", first, last);
    }
    const auto at = [&](std::size_t d) { return shape.begin() + static_cast<std::ptrdiff_t>(d); };
    const std::vector<std::int64_t> flattened(at(first), at(last + 1));
    const std::int64_t size = volume(Box::full(flattened));
    if (rule_->sizes && stage_->sizes(*rule_->sizes, size, true) != flattened) {
      fail(ErrorCode::invalid_argument, "its dimensions {} to {} are {}, expected {}", first, last,
           shape_to_string(flattened), shape_to_string(stage_->sizes(*rule_->sizes, size, true)));
    }
    std::vector<std::int64_t> to(shape.begin(), at(first));
    to.push_back(size);
    to.insert(to.end(), at(last + 1), shape.end());
    return to;
  }

  void cast_item(MapItem& item) {
    if (rule_->from_dtype && item.dtype != *rule_->from_dtype) {
      fail(ErrorCode::invalid_argument, "it has dtype {}, expected {}", dtype_name(item.dtype),
           dtype_name(*rule_->from_dtype));
    }
    if (item.dtype == *rule_->dtype) return;
    if (!can_cast(item.dtype, *rule_->dtype)) {
      fail(ErrorCode::invalid_argument, "it has dtype {}, expected one with a cast to {}", dtype_name(item.dtype),
           dtype_name(*rule_->dtype));
    }
    check_size(*item.tensor, *rule_->dtype);
    item.dtype = *rule_->dtype;
    std::map<std::size_t, std::size_t> cast_inputs;
    item.tensor = item.tensor->renumbered([&](std::size_t number) {
      const auto [known, is_new] = cast_inputs.try_emplace(number, inputs_.size());
      if (is_new) {
        ComputedTensors::Input input = inputs_[number];
        input.casts.push_back(item.dtype);
        inputs_.push_back(std::move(input));
      }
      return known->second;
    });
  }

  // Splits or unstacks a tensor.
  void divide(const MapItem& item, const std::vector<std::string>& groups, std::vector<MapItem>& results) {
    const bool unstacks = rule_->op == MapOp::unstack;
    const std::size_t dim = dim_of(item, unstacks ? 0 : rule_->dims[0]);
    const std::int64_t size = item.tensor->shape()[dim];
    if (unstacks) check_declared_count(size);
    check_count(results.size() + (unstacks ? static_cast<std::size_t>(size) : rule_->to.size()));
    const std::vector<std::int64_t> sizes = unstacks ? std::vector<std::int64_t>(static_cast<std::size_t>(size), 1)
                                                     : parts_of(item.tensor->shape(), dim, rule_->to.size());
    std::vector<MappedTensor> parts = item.tensor->split(dim, sizes);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      MapItem part = item;
      if (unstacks) {
        const std::vector<std::int64_t>& shape = item.tensor->shape();
        part.tensor = parts[i].reshaped({shape.begin() + 1, shape.end()});
        name_item(part, rule_->to[0].name(groups, i));
      } else {
        part.tensor = std::move(parts[i]);
        name_item(part, rule_->to[i].name(groups));
      }
      results.push_back(std::move(part));
    }
  }

  void check_declared_count(std::int64_t found) const {
    if (!rule_->count) return;
    if (const std::int64_t expected = stage_->value(*rule_->count); found != expected) {
      fail(ErrorCode::invalid_argument, "it is {} tensors, expected {}", found, expected);
    }
  }

  // Tensors that become one, by the text of their groups: the number of the part, and of the item. An item that is in
  // two families is a problem, as only one can replace it.
  using Families = std::map<std::vector<std::string>, std::map<std::size_t, std::size_t>>;

  bool apply_concat() {
    Families families;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      std::optional<std::vector<std::string>> family;
      for (std::size_t part = 0; part < rule_->match.size(); ++part) {
        const auto groups = rule_->match[part].match(items_[i].name);
        if (!groups) continue;
        if (family && *family != *groups) {
          problem(fmt::format("'{}' is a part of '{}' and of '{}', expected a part of one tensor",
                              printable(items_[i].name), printable(rule_->to[0].name(*family)),
                              printable(rule_->to[0].name(*groups))));
        }
        family = groups;
        add_member(families, *groups, part, i);
      }
    }
    join(families, [&](const std::vector<std::string>& groups, const std::vector<std::size_t>& members) {
      const MapItem& first = items_[members[0]];
      const std::size_t dim = dim_of(first, rule_->dims[0]);
      if (members.size() != rule_->match.size()) {
        fail(ErrorCode::invalid_argument, "found {} of the {} parts of '{}', expected all", members.size(),
             rule_->match.size(), printable(rule_->to[0].name(groups)));
      }
      std::vector<MappedTensor> parts;
      std::vector<std::int64_t> found, shape = first.tensor->shape();
      shape[dim] = 0;
      for (const std::size_t member : members) {
        const MapItem& item = items_[member];
        check_joins(first, item, dim);
        parts.push_back(*item.tensor);
        found.push_back(item.tensor->shape()[dim]);
        shape[dim] = checked_add(shape[dim], found.back(), "the sizes");
      }
      if (rule_->sizes && parts_of(shape, dim, members.size()) != found) {
        fail(ErrorCode::invalid_argument, "its parts have the sizes {}, expected {}", shape_to_string(found),
             shape_to_string(parts_of(shape, dim, members.size())));
      }
      return MappedTensor::concat(parts, dim);
    });
    return !families.empty();
  }

  bool apply_stack() {
    Families families;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      auto groups = rule_->match[0].match(items_[i].name);
      if (!groups) continue;
      std::string& index = (*groups)[rule_->index - 1];
      const bool is_number = !index.empty() && index.size() <= 9 &&
                             index.find_first_not_of("0123456789") == std::string::npos &&
                             (index.size() == 1 || index[0] != '0');
      if (!is_number) {
        problem(fmt::format("'{}': its index is '{}', expected a number without leading zeros",
                            printable(items_[i].name), printable(index)));
        continue;
      }
      const auto number = static_cast<std::size_t>(std::stoul(index));
      index.clear();
      add_member(families, *groups, number, i);
    }
    join(families, [&](const std::vector<std::string>&, const std::vector<std::size_t>& members) {
      const MapItem& first = items_[members[0]];
      std::vector<MappedTensor> parts;
      for (const std::size_t member : members) {
        check_joins(first, items_[member], std::nullopt);
        std::vector<std::int64_t> shape = first.tensor->shape();
        shape.insert(shape.begin(), 1);
        parts.push_back(items_[member].tensor->reshaped(shape));
      }
      check_declared_count(std::ssize(members));
      return MappedTensor::concat(parts, 0);
    });
    return !families.empty();
  }

  void add_member(Families& families, const std::vector<std::string>& groups, std::size_t part, std::size_t item) {
    items_[item].is_matched = true;
    const auto [known, is_new] = families[groups].try_emplace(part, item);
    if (is_new) return;
    problem(fmt::format("'{}' and '{}' are the same part of one tensor, expected one of them",
                        printable(items_[known->second].name), printable(items_[item].name)));
  }

  // Replaces the members of each family by one tensor, at the place of the first.
  template <typename Join>
  void join(const Families& families, const Join& join_members) {
    std::map<std::size_t, MapItem> joined;  // by the place
    std::set<std::size_t> gone;
    for (const auto& family : families) {
      const std::vector<std::string>& groups = family.first;
      const std::map<std::size_t, std::size_t>& parts = family.second;
      std::vector<std::size_t> members;
      members.reserve(parts.size());
      for (const auto& [part, item] : parts) members.push_back(item);
      const MapItem& first = items_[members[0]];
      with_problems(first, [&] {
        for (const auto& [part, item] : parts) {
          if (!items_[item].tensor) {
            fail(ErrorCode::invalid_argument, "'{}' is an object, expected a tensor", printable(items_[item].name));
          }
        }
        if (rule_->op == MapOp::stack && parts.rbegin()->first + 1 != parts.size()) {
          fail(ErrorCode::invalid_argument, "found {} tensors up to the index {}, expected one for each index from 0",
               parts.size(), parts.rbegin()->first);
        }
        MapItem result = first;
        result.tensor = join_members(groups, members);
        check_size(*result.tensor, result.dtype);
        name_item(result, rule_->to[0].name(groups));
        joined.emplace(*std::ranges::min_element(members), std::move(result));
        gone.insert(members.begin(), members.end());
      });
    }
    std::vector<MapItem> results;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      if (const auto found = joined.find(i); found != joined.end()) {
        results.push_back(std::move(found->second));
      } else if (!gone.contains(i)) {
        results.push_back(std::move(items_[i]));
      }
    }
    items_ = std::move(results);
  }

  // Throws unless two tensors are equal in dtype and in all dimensions but `dim`.
  void check_joins(const MapItem& first, const MapItem& item, std::optional<std::size_t> dim) const {
    if (item.dtype != first.dtype) {
      fail(ErrorCode::invalid_argument, "{} has dtype {}, expected {}; cast one of them before", describe(item),
           dtype_name(item.dtype), dtype_name(first.dtype));
    }
    std::vector<std::int64_t> expected = first.tensor->shape(), found = item.tensor->shape();
    if (dim && found.size() == expected.size()) expected[*dim] = found[*dim];
    if (found != expected) {
      fail(ErrorCode::invalid_argument, "found {}, expected the shape {}{}", describe(item), shape_to_string(expected),
           dim ? fmt::format(" with any size in dimension {}", *dim) : "");
    }
  }

  void finish_unmatched() {
    if (stage_->unmatched == Unmatched::keep) return;
    if (stage_->unmatched == Unmatched::drop) {
      std::erase_if(items_, [](const MapItem& item) { return !item.is_matched; });
      return;
    }
    std::string names;
    std::size_t count = 0;
    for (const MapItem& item : items_) {
      if (item.is_matched) continue;
      if (++count <= kShownNames) names += fmt::format("{}'{}'", names.empty() ? "" : ", ", printable(item.name));
    }
    if (count == 0) return;
    if (count > kShownNames) names += fmt::format(" and {} more", count - kShownNames);
    problem(fmt::format("no rule matches {}, expected one for each name, as \"unmatched\" is \"error\"", names));
  }

  void check_names() {
    std::map<std::string_view, const MapItem*> known;
    for (const MapItem& item : items_) {
      const auto [first, is_new] = known.try_emplace(item.name, &item);
      if (is_new) continue;
      const auto from = [](const MapItem& one) { return one.made_by.empty() ? "the checkpoint" : one.made_by; };
      problem(fmt::format("two results have the name '{}': of {} and of {}, expected unique names",
                          printable(item.name), from(*first->second), from(item)));
      if (has_too_many_problems()) return;
    }
  }

  std::shared_ptr<const Checkpoint> checkpoint_;
  std::vector<ComputedTensors::Input> inputs_;
  std::vector<MapItem> items_;
  std::size_t max_items_ = 0;
  std::vector<std::string> problems_;
  const MapStage* stage_ = nullptr;
  const MapRule* rule_ = nullptr;       // null after the last
  std::set<std::string> names_before_;  // of the items before the rule, if it asks for them
};

}  // namespace

MapResult apply_stages(const std::vector<MapStage>& stages, const std::shared_ptr<const Checkpoint>& checkpoint) {
  MapApplication application(checkpoint);
  for (const MapStage& stage : stages) application.apply(stage);
  return application.result();
}

}  // namespace tessera::checkpoint
