#include "format/dcp/input.h"

#include "tessera/base/dtype.h"
#include "tessera/format/python_value.h"

namespace tessera::dcp {

using pickle::Kind;
using pickle::NodeRef;

std::string describe(NodeRef value) {
  if (value.is(Kind::global)) {
    return fmt::format("the global {}.{}", printable(value.global().module), printable(value.global().name));
  }
  if (value.is(Kind::object) && value.object().callable.is(Kind::global)) {
    const pickle::GlobalName& name = value.object().callable.global();
    return fmt::format("an object of {}.{}", printable(name.module), printable(name.name));
  }
  if (value.is(Kind::integer)) return fmt::format("{}", value.integer());
  if (value.is(Kind::boolean)) return value.boolean() ? "True" : "False";
  if (value.is(Kind::none)) return "None";
  if (value.is(Kind::string)) return fmt::format("'{}'", printable(value.string()));
  return fmt::format("{} {}", value.is(Kind::object) ? "an" : "a", kind_name(value.kind()));
}

void Input::fail_at(ErrorCode code, std::string_view name, std::string_view field, std::string_view found,
                    std::string_view expected) const {
  if (name.data() == nullptr) fail(code, "{}: {}: found {}, expected {}", file_, field, found, expected);
  fail(code, "{}: '{}': {}: found {}, expected {}", file_, printable(name), field, found, expected);
}

std::size_t Input::counts(NodeRef value, std::string_view name, std::string_view field,
                          std::vector<std::int64_t>& out) {
  const NodeRef members = members_of_size(value);
  if (!members.is(Kind::tuple) && !members.is(Kind::list)) wrong_value(name, field, value, "a torch.Size");
  const std::span<const NodeRef> items = members.items();
  for (const NodeRef item : items) out.push_back(count(item, name, field));
  return items.size();
}

void Input::too_large() const {
  fail(ErrorCode::corrupt,
       "{}: repeats chunks or texts beyond the limit for a file of its size, expected at most {} bytes of them", file_,
       memory_limit_);
}

void Input::wrong_count(NodeRef value, std::string_view name, std::string_view field) const {
  constexpr std::size_t kShownDigits = 100;
  const bool is_big = value.is(Kind::big_integer);
  fail_at(ErrorCode::corrupt, name, field, is_big ? pickle::repr(value, kShownDigits) : describe(value),
          is_big || value.is(Kind::integer) ? "an int from 0 to 2**63 - 1" : "an int");
}

// Returns the tuple in torch.Size(tuple), or the value itself if it is not a torch.Size.
NodeRef Input::members_of_size(NodeRef value) {
  if (!value.is(Kind::object)) return value;
  const pickle::Object& object = value.object();
  if (object.callable.identity() != size_class_) {
    if (!object.calls(kSize.module, kSize.name)) return value;
    size_class_ = object.callable.identity();
  }
  const bool is_call = object.arguments.is(Kind::tuple) && object.arguments.items().size() == 1 && !object.has_state;
  return is_call ? object.arguments.items()[0] : value;
}

}  // namespace tessera::dcp
