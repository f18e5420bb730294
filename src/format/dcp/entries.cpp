#include "format/dcp/entries.h"

#include <fmt/ranges.h>

namespace tessera::dcp {

using pickle::Kind;
using pickle::NodeRef;
using pickle::Object;

std::vector<MetadataEntry> EntryReader::read(NodeRef state_dict_metadata) {
  if (!state_dict_metadata.is(Kind::dict)) input_.wrong_value({}, "state_dict_metadata", state_dict_metadata, "a dict");
  const std::span<const pickle::Pair> pairs = state_dict_metadata.pairs();
  std::vector<MetadataEntry> entries(pairs.size());
  names_.reserve(pairs.size());
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    MetadataEntry& entry = entries[i];
    const std::string_view name = input_.string(pairs[i].key, {}, "a name in state_dict_metadata");
    input_.charge(sizeof(MetadataEntry) + name.size());
    entry.name = name;
    if (!names_.add(name, static_cast<std::uint32_t>(i))) {
      input_.fail_at(ErrorCode::corrupt, entry.name, "state_dict_metadata", "the name twice", "it once");
    }
    if (tensor_.is_instance(pairs[i].value)) {
      read_tensor(pairs[i].value, entry);
    } else if (object_.is_instance(pairs[i].value)) {
      object_.read(pairs[i].value, entry.name);
      entry.items.resize(1);
    } else {
      input_.fail_at(pairs[i].value.is(Kind::object) ? ErrorCode::unsupported : ErrorCode::corrupt, entry.name,
                     "state_dict_metadata", describe(pairs[i].value),
                     "an object of TensorStorageMetadata or BytesStorageMetadata");
    }
  }
  return entries;
}

void EntryReader::read_tensor(NodeRef value, MetadataEntry& entry) {
  const FoundFields<TensorFields> found = tensor_.read(value, entry.name);
  tensor_.require(found, {TensorFields::properties, TensorFields::size, TensorFields::chunks}, entry.name);
  entry.is_tensor = true;
  entry.properties = read_properties(found[TensorFields::properties], entry.name);
  input_.counts(found[TensorFields::size], entry.name, "size", entry.shape);
  input_.charge(entry.shape.size() * sizeof(std::int64_t));
  check_bytes({{}, entry.shape}, entry, "size");
  read_chunks(found[TensorFields::chunks], entry);
}

void EntryReader::read_chunks(NodeRef list, MetadataEntry& entry) {
  if (!list.is(Kind::list)) input_.wrong_value(entry.name, "chunks", list, "a list");
  const std::size_t rank = entry.shape.size(), count = list.items().size();
  for (std::size_t i = 0; i < count; ++i) input_.charge(2 * rank * sizeof(std::int64_t) + sizeof(StoredItem));
  entry.chunks = BoxList(rank);
  entry.chunks.reserve(count);
  entry.items.resize(count);
  for (const NodeRef item : list.items()) {
    const auto [offsets, sizes] = records_.chunk(item, entry.name);
    if (offsets.size() != rank || sizes.size() != rank) {
      input_.fail_at(ErrorCode::corrupt, entry.name, "chunks",
                     fmt::format("offsets {} and sizes {}", shape_to_string(offsets), shape_to_string(sizes)),
                     fmt::format("{} dimensions as in size {}", rank, shape_to_string(entry.shape)));
    }
    check_bytes({offsets, sizes}, entry, "chunks");
    entry.chunks.push_back({offsets, sizes});
  }
}

// Neither the ends of the box nor its bytes may overflow. A shape has no offsets.
void EntryReader::check_bytes(BoxView box, const MetadataEntry& entry, std::string_view field) const {
  std::int64_t bytes = dtype_size(entry.properties.dtype), end = 0;
  for (std::size_t d = 0; d < box.sizes.size(); ++d) {
    const bool overflows = __builtin_mul_overflow(bytes, box.sizes[d], &bytes) ||
                           (!box.offsets.empty() && __builtin_add_overflow(box.offsets[d], box.sizes[d], &end));
    if (!overflows) continue;
    input_.fail_at(ErrorCode::corrupt, entry.name, field,
                   fmt::format("offsets {} and sizes {}, which overflow at dimension {}", shape_to_string(box.offsets),
                               shape_to_string(box.sizes), d),
                   "less than 2**63 bytes");
  }
}

TensorProperties EntryReader::read_properties(NodeRef value, std::string_view name) {
  using Fields = PropertiesFields;
  if (!properties_.is_instance(value)) input_.wrong_value(name, "properties", value, "an object of TensorProperties");
  const Object& object = value.object();
  if (!object.has_state || !object.state.is(Kind::tuple) || object.state.items().size() != Fields::count ||
      object.extra_address != 0) {
    input_.fail_at(ErrorCode::unsupported, name, "TensorProperties",
                   object.state.is(Kind::tuple) ? fmt::format("a state of {} values", object.state.items().size())
                                                : describe(object.state),
                   fmt::format("a tuple of {}", Fields::count + 0));
  }
  if (!saw_tensor_) {
    saw_tensor_ = true;
    saw_old_properties_ = object.callable.global() == class_name(Class::properties, Dialect::torch_2_0);
  }
  const std::span<const NodeRef> state = object.state.items();
  TensorProperties properties;
  properties.dtype = read_dtype(state[Fields::dtype], name);
  properties.layout = read_layout(state[Fields::layout], name);
  properties.requires_grad = input_.boolean(state[Fields::requires_grad], name, "requires_grad");
  properties.memory_format = read_memory_format(state[Fields::memory_format], name);
  properties.pin_memory = input_.boolean(state[Fields::pin_memory], name, "pin_memory");
  return properties;
}

DType EntryReader::read_dtype(NodeRef value, std::string_view name) const {
  if (!value.is(Kind::global) || value.global().module != "torch")
    input_.wrong_value(name, "dtype", value, "a torch.dtype");
  const std::optional<DType> dtype = find_dtype(value.global().name);
  if (!dtype) {
    input_.fail_at(ErrorCode::unsupported, name, "dtype", "torch." + printable(value.global().name),
                   "a dtype that this version knows");
  }
  return *dtype;
}

// torch.serialization._get_layout('torch.strided')
std::string EntryReader::read_layout(NodeRef value, std::string_view name) const {
  const bool is_call = value.is(Kind::object) && value.object().calls(kLayout.module, kLayout.name) &&
                       value.object().arguments.is(Kind::tuple) && value.object().arguments.items().size() == 1;
  if (!is_call) input_.wrong_value(name, "layout", value, "a torch.layout");
  const std::string_view layout = input_.string(value.object().arguments.items()[0], name, "layout");
  input_.charge(layout.size());
  return std::string(layout);
}

// The enum called with its value, or getattr of the enum and a name, as different versions of Python write it.
MemoryFormat EntryReader::read_memory_format(NodeRef value, std::string_view name) {
  if (value.is(Kind::object) && value.object().arguments.is(Kind::tuple)) {
    const Object& call = value.object();
    const std::span<const NodeRef> arguments = call.arguments.items();
    if (memory_format_.is_class(call.callable) && arguments.size() == 1 && arguments[0].is(Kind::integer)) {
      const std::int64_t number = arguments[0].integer();
      if (number >= 0 && number < static_cast<std::int64_t>(kMemoryFormats.size())) {
        return static_cast<MemoryFormat>(number);
      }
      input_.wrong_value(name, "memory_format", arguments[0], "0, 1 or 2");
    }
    if (call.calls(kGetattr.module, kGetattr.name) && arguments.size() == 2 && memory_format_.is_class(arguments[0])) {
      for (std::size_t i = 0; i < kMemoryFormats.size(); ++i) {
        if (arguments[1].is_string(kMemoryFormats[i])) return static_cast<MemoryFormat>(i);
      }
      input_.wrong_value(name, "memory_format", arguments[1], fmt::format("{}", fmt::join(kMemoryFormats, ", ")));
    }
  }
  input_.wrong_value(name, "memory_format", value, "a member of the enum MEM_FORMAT_ENCODING");
}

}  // namespace tessera::dcp
