#pragma once
// Hand-made pickles of `.metadata`, valid or invalid in any field.

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "format/dcp/names.h"
#include "tessera/format/pickle_value.h"
#include "tessera/format/pickle_writer.h"

namespace tessera::testing {

struct Forge {
  using NodeRef = pickle::NodeRef;
  using Fields = std::vector<std::pair<std::string, NodeRef>>;
  using Pairs = std::vector<std::pair<NodeRef, NodeRef>>;
  struct Chunk {
    std::vector<std::int64_t> offsets, sizes;
  };

  pickle::Tree tree;
  // The arguments of `tensor`.
  NodeRef dtype = tree.make_global("torch", "float32");
  NodeRef layout = call(dcp::kLayout, {text("torch.strided")});
  NodeRef requires_grad = tree.make_boolean(false);
  NodeRef memory_format =
      call(dcp::class_name(dcp::Class::memory_format, dcp::Dialect::torch_2), {tree.make_integer(0)});

  NodeRef text(std::string_view text) { return tree.make_string(text); }
  NodeRef number(std::int64_t value) { return tree.make_integer(value); }
  NodeRef class_of(dcp::Class what) {
    const pickle::GlobalName name = dcp::class_name(what, dcp::Dialect::torch_2);
    return tree.make_global(name.module, name.name);
  }
  NodeRef call(const pickle::GlobalName& name, const std::vector<NodeRef>& arguments) {
    return tree.make_object(pickle::Object::Made::reduce, tree.make_global(name.module, name.name),
                            tree.make_tuple(arguments));
  }
  NodeRef dict(const Pairs& pairs) {
    const NodeRef result = tree.make_dict();
    for (const auto& [key, value] : pairs) tree.set_items(result, std::vector<NodeRef>{key, value});
    return result;
  }
  NodeRef object(NodeRef callable, std::optional<NodeRef> state) {
    const NodeRef result = tree.make_object(pickle::Object::Made::new_object, callable, tree.make_tuple({}));
    if (state) tree.set_state(result, *state);
    return result;
  }
  NodeRef instance(dcp::Class what, const Fields& fields) {
    Pairs pairs;
    for (const auto& [name, value] : fields) pairs.emplace_back(text(name), value);
    return object(class_of(what), dict(pairs));
  }
  NodeRef size(const std::vector<std::int64_t>& numbers) {
    std::vector<NodeRef> values;
    for (const std::int64_t n : numbers) values.push_back(number(n));
    return call(dcp::kSize, {tree.make_tuple(values)});
  }
  NodeRef chunk(const Chunk& chunk) {
    return instance(dcp::Class::chunk, {{"offsets", size(chunk.offsets)}, {"sizes", size(chunk.sizes)}});
  }
  NodeRef properties() {
    const std::vector<NodeRef> state = {dtype, layout, requires_grad, memory_format, tree.make_boolean(false)};
    return object(class_of(dcp::Class::properties), tree.make_tuple(state));
  }
  NodeRef tensor_of(NodeRef size, const std::vector<NodeRef>& chunks) {
    return instance(dcp::Class::tensor,
                    {{"properties", properties()}, {"size", size}, {"chunks", tree.make_list(chunks)}});
  }
  NodeRef tensor(const std::vector<std::int64_t>& shape, const std::vector<Chunk>& chunks) {
    std::vector<NodeRef> values;
    for (const Chunk& one : chunks) values.push_back(chunk(one));
    return tensor_of(size(shape), values);
  }
  NodeRef index(std::string_view name, const std::optional<std::vector<std::int64_t>>& offset, std::int64_t hint = 0) {
    Fields fields = {{"fqn", text(name)}, {"index", number(hint)}};
    if (offset) fields.emplace_back("offset", size(*offset));
    return instance(dcp::Class::index, fields);
  }
  NodeRef info(std::string_view path, std::int64_t offset, std::int64_t length) {
    return instance(dcp::Class::storage_info,
                    {{"relative_path", text(path)}, {"offset", number(offset)}, {"length", number(length)}});
  }

  Bytes pickled(NodeRef root) const {
    Bytes out;
    pickle::Writer writer(out, 4);
    writer.value(root);
    writer.stop();
    return out;
  }
  Bytes bytes(const Fields& entries, const Pairs& storage, const Fields& more = {}) {
    Pairs pairs;
    for (const auto& [name, value] : entries) pairs.emplace_back(text(name), value);
    Fields fields = {{"state_dict_metadata", dict(pairs)}, {"storage_data", dict(storage)}};
    fields.insert(fields.end(), more.begin(), more.end());
    return pickled(instance(dcp::Class::metadata, fields));
  }
};

}  // namespace tessera::testing
