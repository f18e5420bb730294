#pragma once
// Reads the fields of fields.h from a saved state.

#include <ATen/ATen.h>

#include <cmath>
#include <set>
#include <string>

#include "state/optimizer/fields.h"
#include "tessera/layout/box.h"
#include "tessera/state/internal/parameter_parts.h"
#include "tessera/state/internal/problems.h"

namespace tessera {

// Returns the number in a value; Python keeps some numbers as tensors of one element.
inline std::optional<double> number_in(const Value& value) {
  if (value.is<std::int64_t>() || value.is<double>()) return value.number();
  if (const auto* tensor = value.get_if<at::Tensor>(); tensor && tensor->numel() == 1 && !tensor->is_complex()) {
    return tensor->detach().to(at::kCPU, at::kDouble).item<double>();
  }
  return std::nullopt;
}

inline std::optional<std::int64_t> integer_in(const Value& value) {
  if (const auto* integer = value.get_if<std::int64_t>()) return *integer;
  const std::optional<double> number = number_in(value);
  constexpr double kEnd = 9007199254740992.0;  // 2^53; doubles represent all integers up to it
  if (!number || *number != std::floor(*number) || std::abs(*number) > kEnd) return std::nullopt;
  return static_cast<std::int64_t>(*number);
}

// Reads the keys of one dict and collects the problems.
class FieldReader {
 public:
  FieldReader(const Dict& dict, std::string whose, Problems& problems)
      : dict_(dict), whose_(std::move(whose)), problems_(problems) {}

 protected:
  // Returns null if the key is missing, which may be valid.
  const Value* look(const char* name) {
    seen_.insert(name);
    return dict_.find(name);
  }
  const Value* require(const char* name) {
    const Value* found = look(name);
    if (!found) problems_.add("missing", described(name));
    return found;
  }
  void add_wrong(const char* name, const Value& found, std::string_view expected) {
    problems_.add("wrong", fmt::format("{} is {}, expected {}", described(name), to_string(found, 60), expected));
  }
  std::string described(std::string_view name) const { return fmt::format("'{}' of {}", printable(name), whose_); }

  const Dict& dict_;
  std::string whose_;
  Problems& problems_;
  std::set<std::string, std::less<>> seen_;
};

class OptionsReader : public FieldReader {
 public:
  using FieldReader::FieldReader;

  void operator()(const char* name, double& member) { read(name, member, "a number", number_in); }
  void operator()(const char* name, std::int64_t& member) { read(name, member, "an int", integer_in); }
  void operator()(const char* name, bool& member) {
    read(name, member, "a bool", [](const Value& value) -> std::optional<bool> {
      const bool* found = value.get_if<bool>();
      return found ? std::optional(*found) : std::nullopt;
    });
  }
  void operator()(const char* name, std::tuple<double, double>& member) {
    using Pair = std::tuple<double, double>;
    read(name, member, "two numbers", [](const Value& value) -> std::optional<Pair> {
      const ValueSequence* items = value.get_if<Tuple>();
      if (!items) items = value.get_if<List>();
      if (!items || items->size() != 2) return std::nullopt;
      const std::optional<double> first = number_in((*items)[0]), second = number_in((*items)[1]);
      return first && second ? std::optional(Pair(*first, *second)) : std::nullopt;
    });
  }
  void operator()(const char* name, OptionalInt& member) {
    const Value* found = require(name);
    if (!found || found->is_none()) return void(member = OptionalInt());
    const std::optional<std::int64_t> number = integer_in(*found);
    if (!number) return add_wrong(name, *found, "an int or None");
    member = *number;
  }
  void operator()(const char* name, OptionalString& member) {
    const Value* found = require(name);
    if (!found || found->is_none()) return void(member = OptionalString());
    const std::string* text = found->get_if<std::string>();
    if (!text) return add_wrong(name, *found, "a str or None");
    member = *text;
  }
  void fixed(const char* name, bool expected) {
    const Value* found = look(name);
    if (!found || *found == Value(expected)) return;
    problems_.add("unsupported", fmt::format("{} is {}, expected {} as in C++", described(name), to_string(*found, 60),
                                             to_string(Value(expected))));
  }
  void ignored(const char* name, const Value&) { look(name); }

  // Reports the options that no field has read.
  void refuse_others() {
    static const std::set<std::string, std::less<>> harmless = {
        "params",     "param_names", "foreach", "fused",  "capturable",    "differentiable",
        "initial_lr", "max_lr",      "min_lr",  "swa_lr", "base_momentum", "max_momentum"};
    for (const auto& [key, value] : dict_) {
      const std::string* name = std::get_if<std::string>(&key);
      if (name && (seen_.contains(*name) || harmless.contains(*name))) continue;
      problems_.add("unsupported", fmt::format("unknown option {}", described(name ? *name : to_string(key))));
    }
  }

 private:
  template <typename T, typename Read>
  void read(const char* name, T& member, std::string_view expected, Read&& convert) {
    const Value* found = require(name);
    if (!found) return;
    if (const std::optional<T> value = convert(*found)) {
      member = *value;
    } else {
      add_wrong(name, *found, expected);
    }
  }
};

class StateReader : public FieldReader {
 public:
  // `take`: whether to use tensors that fit without a copy.
  StateReader(const Dict& dict, const std::string& name, const at::Tensor& parameter, const ParameterParts& parts,
              bool take, Problems& problems)
      : FieldReader(dict, fmt::format("parameter '{}'", printable(name)), problems),
        parameter_(parameter),
        parts_(parts),
        take_(take) {}

  void counter(const char* name, std::int64_t& member) { integer(name, member); }
  void integer(const char* name, std::int64_t& member) {
    const Value* found = require(name);
    if (!found) return;
    const std::optional<std::int64_t> number = integer_in(*found);
    if (!number || *number < 0) return add_wrong(name, *found, "an int of at least 0");
    member = *number;
  }
  void real(const char* name, double& member) {
    const Value* found = require(name);
    if (!found) return;
    const std::optional<double> number = number_in(*found);
    if (!number) return add_wrong(name, *found, "a number");
    member = *number;
  }
  void tensor(const char* name, at::Tensor& member, bool is_used, double = 0) {
    if (const Value* found = is_used ? require(name) : look(name)) shaped(name, *found, member, !is_used);
  }
  void optional_tensor(const char* name, at::Tensor& member, bool) {
    if (const Value* found = look(name)) shaped(name, *found, member, true);
    is_empty_ = !member.defined();
  }
  bool has(const char* name, const at::Tensor&) { return look(name) != nullptr; }
  void flat(const char* name, at::Tensor& member) {
    const Value* found = require(name);
    if (!found || found->is_none()) return;
    if (const auto* given = found->get_if<at::Tensor>()) {
      member = converted(*given);
    } else if (const std::optional<double> number = number_in(*found)) {
      member = at::scalar_tensor(*number, parameter_.options().requires_grad(false));
    } else {
      add_wrong(name, *found, "a tensor");
    }
  }
  template <typename Tensors>
  void tensors(const char* name, Tensors& member) {
    const Value* found = require(name);
    if (!found) return;
    const List* list = found->get_if<List>();
    if (!list) return add_wrong(name, *found, "a list of tensors");
    for (const Value& item : *list) {
      const auto* given = item.get_if<at::Tensor>();
      if (!given) return add_wrong(name, *found, "a list of tensors");
      member.push_back(converted(*given));
    }
  }

  // Returns whether the state read equals that before the first step.
  bool is_empty() const { return is_empty_; }

  void refuse_others() {
    for (const auto& [key, value] : dict_) {
      const std::string* name = std::get_if<std::string>(&key);
      if (name && (seen_.contains(*name) || *name == "al")) continue;
      problems_.add("unsupported", fmt::format("unknown key {}", described(name ? *name : to_string(key))));
    }
  }

 private:
  void shaped(const char* name, const Value& found, at::Tensor& member, bool may_be_none) {
    if (may_be_none && found.is_none()) return;
    const std::optional<at::Tensor> given = parts_.from_state(parameter_, found);
    if (!given) return add_wrong(name, found, expected());
    member = converted(*given);
  }

  std::string expected() const {
    const std::string tensor = "a tensor " + shape_to_string(parts_.size_of(parameter_));
    return parts_.find(parameter_) != nullptr ? tensor + " or this rank's shard of it" : tensor;
  }

  // Returns `given` on the parameter's device, with its dtype if that is floating-point, as PyTorch's optimizers do.
  at::Tensor converted(const at::Tensor& given) const {
    const at::ScalarType type = parameter_.is_floating_point() ? parameter_.scalar_type() : given.scalar_type();
    return given.detach().to(parameter_.device(), type, /*non_blocking=*/false, /*copy=*/!take_);
  }

  const at::Tensor& parameter_;
  const ParameterParts& parts_;
  bool take_;
  bool is_empty_ = false;
};

}  // namespace tessera
