#include "tessera/state/value.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {

namespace {

// A dict with more entries than this looks up keys in a table instead of scanning.
constexpr std::size_t kFewEntries = 16;

}  // namespace

std::string_view kind_name(ValueKind kind) {
  switch (kind) {
    case ValueKind::none:
      return "None";
    case ValueKind::boolean:
      return "bool";
    case ValueKind::integer:
      return "int";
    case ValueKind::floating:
      return "float";
    case ValueKind::string:
      return "str";
    case ValueKind::bytes:
      return "bytes";
    case ValueKind::list:
      return "list";
    case ValueKind::tuple:
      return "tuple";
    case ValueKind::dict:
      return "dict";
    case ValueKind::tensor:
      return "tensor";
    case ValueKind::sharded_tensor:
      return "sharded tensor";
    case ValueKind::nested_sharded_tensor:
      return "nested sharded tensor";
    case ValueKind::checkpointable:
      return "checkpointable";
    case ValueKind::opaque:
      return "opaque object";
    case ValueKind::stateful:
      return "stateful";
  }
  return "?";
}

std::int64_t detail::to_int64(std::uint64_t value) {
  if (!std::in_range<std::int64_t>(value)) {
    fail(ErrorCode::invalid_argument, "state value: the int is {}, expected a signed 64-bit one", value);
  }
  return static_cast<std::int64_t>(value);
}

Value::Value() = default;
Value::Value(const char* text) : Value(std::string(text)) {}
Value::Value(std::string_view text) : Value(std::string(text)) {}
Value::Value(std::string text) : data_(std::move(text)) {}
Value::Value(Bytes bytes) : data_(std::move(bytes)) {}
Value::Value(List list) : data_(std::make_unique<List>(std::move(list))) {}
Value::Value(Tuple tuple) : data_(std::make_unique<Tuple>(std::move(tuple))) {}
Value::Value(Dict dict) : data_(std::make_unique<Dict>(std::move(dict))) {}

Value::Value(at::Tensor tensor) : data_(std::move(tensor)) {
  if (!std::get<at::Tensor>(data_).defined()) {
    fail(ErrorCode::invalid_argument, "state value: found an undefined tensor, expected a tensor or None");
  }
}

Value::Value(ShardedTensor tensor) : data_(std::move(tensor)) {}
Value::Value(NestedShardedTensor tensor) : data_(std::make_shared<const NestedShardedTensor>(std::move(tensor))) {}

Value::Value(const DTensor& tensor) : Value(Reference{tensor.checkpointable()}) {}

Value::Value(Reference reference) : data_(std::move(reference.tensor)) {
  if (!std::get<std::shared_ptr<Checkpointable>>(data_)) {
    fail(ErrorCode::invalid_argument, "state value: found a null pointer, expected a checkpointable");
  }
}

Value::Value(std::shared_ptr<const OpaqueObject> object) : data_(std::move(object)) {
  if (!std::get<std::shared_ptr<const OpaqueObject>>(data_)) {
    fail(ErrorCode::invalid_argument, "state value: found a null pointer, expected an opaque object");
  }
}

Value::Value(StatefulReference reference) : data_(std::move(reference.object)) {
  if (!std::get<std::shared_ptr<Stateful>>(data_)) {
    fail(ErrorCode::invalid_argument, "state value: found a null pointer, expected a stateful");
  }
}

Value::Data Value::copy_of(const Data& data) {
  return std::visit(
      []<typename T>(const T& member) -> Data {
        if constexpr (detail::OneOf<T, std::unique_ptr<List>, std::unique_ptr<Tuple>, std::unique_ptr<Dict>>) {
          return T(std::make_unique<typename T::element_type>(*member));
        } else {
          return member;
        }
      },
      data);
}

Value::Value(const Value& other) : data_(copy_of(other.data_)) {}
Value::Value(Value&& other) noexcept : data_(std::exchange(other.data_, std::monostate())) {}

Value& Value::operator=(const Value& other) {
  // Copy first: `other` may be a part of this value.
  if (this != &other) data_ = copy_of(other.data_);
  return *this;
}

Value& Value::operator=(Value&& other) noexcept {
  Data taken = std::exchange(other.data_, std::monostate());
  data_ = std::move(taken);
  return *this;
}

Value::~Value() = default;

void Value::refuse(ValueKind expected) const {
  fail(ErrorCode::invalid_argument, "state value: found {} ({}), expected {}", kind_name(kind()), to_string(*this, 60),
       kind_name(expected));
}

double Value::number() const {
  if (const auto* integer = get_if<std::int64_t>()) return static_cast<double>(*integer);
  if (const auto* floating = get_if<double>()) return *floating;
  fail(ErrorCode::invalid_argument, "state value: found {} ({}), expected int or float", kind_name(kind()),
       to_string(*this, 60));
}

const Value& ValueSequence::at(std::size_t i) const {
  if (i >= size()) fail(ErrorCode::not_found, "state value: found index {}, expected less than {}", i, size());
  return items_[i];
}

Dict::Dict(std::initializer_list<Entry> entries) {
  reserve(entries.size());
  for (const Entry& entry : entries) insert_or_assign(entry.key, entry.value);
}

std::size_t Dict::KeyHash::operator()(const Key& key) const {
  const auto* text = std::get_if<std::string>(&key);
  return text ? TextHash()(*text) : NumberHash()(static_cast<std::uint64_t>(std::get<std::int64_t>(key)));
}

std::size_t Dict::position_of(const Key& key) const {
  if (entries_.size() > kFewEntries) {
    const auto found = positions_.find(key);
    return found == positions_.end() ? size() : found->second;
  }
  const auto found = std::find_if(begin(), end(), [&](const Entry& entry) { return entry.key == key; });
  return static_cast<std::size_t>(found - begin());
}

const Value* Dict::find(const Key& key) const {
  const std::size_t i = position_of(key);
  return i == size() ? nullptr : &entries_[i].value;
}

Value* Dict::find(const Key& key) { return const_cast<Value*>(std::as_const(*this).find(key)); }

const Value& Dict::at(const Key& key) const {
  if (const Value* found = find(key)) return *found;
  fail(ErrorCode::not_found, "state value: no key {}, expected one of the {} keys", to_string(key), size());
}

Value& Dict::at(const Key& key) { return const_cast<Value&>(std::as_const(*this).at(key)); }

Value& Dict::operator[](const Key& key) {
  if (Value* found = find(key)) return *found;
  entries_.push_back({key, Value()});
  if (size() == kFewEntries + 1) {
    for (std::size_t i = 0; i < size(); ++i) positions_.emplace(entries_[i].key, i);
  } else if (size() > kFewEntries) {
    positions_.emplace(key, size() - 1);
  }
  return entries_.back().value;
}

void Dict::insert_or_assign(const Key& key, Value value) { (*this)[key] = std::move(value); }

bool Dict::erase(const Key& key) {
  const std::size_t at = position_of(key);
  if (at == size()) return false;
  entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(at));
  positions_.clear();
  if (size() > kFewEntries) {
    for (std::size_t i = 0; i < size(); ++i) positions_.emplace(entries_[i].key, i);
  }
  return true;
}

}  // namespace tessera
