#include "format/pickle/read/fold.h"

#include "tessera/format/internal/pickle_text.h"

namespace tessera::pickle {

namespace {

std::optional<NodeRef> encoded(Nodes& nodes, Kind kind, std::span<const NodeRef> arguments) {
  if (arguments.size() != 2 || !arguments[0].is(Kind::string)) return std::nullopt;
  if (!arguments[1].is_string("latin1") && !arguments[1].is_string("latin-1")) return std::nullopt;
  const std::string_view text = arguments[0].string();
  // Allocated from the tree even if the text is not Latin-1: the memory limit also bounds the time of failed attempts.
  std::uint8_t* data = nodes.make_room(text.size());
  const auto size = latin1_from_utf8(text, data);
  if (!size) return std::nullopt;
  const ByteView bytes(data, *size);
  return kind == Kind::bytes ? nodes.text(kind, bytes) : nodes.text_node(kind, bytes);
}

std::optional<NodeRef> byte_array(Nodes& nodes, std::span<const NodeRef> arguments) {
  if (arguments.empty()) return nodes.text_node(Kind::byte_array, {});
  if (arguments.size() == 1 && arguments[0].is(Kind::bytes))
    return nodes.text_node(Kind::byte_array, arguments[0].bytes());
  return encoded(nodes, Kind::byte_array, arguments);
}

std::optional<NodeRef> set(Nodes& nodes, Kind kind, std::span<const NodeRef> arguments) {
  if (arguments.size() > 1 || (arguments.size() == 1 && !arguments[0].is(Kind::list))) return std::nullopt;
  const NodeRef result = nodes.list(kind);
  if (arguments.size() == 1) {
    const auto items = arguments[0].items();
    nodes.append(result, items.data(), items.size());
  }
  return result;
}

}  // namespace

std::optional<NodeRef> fold_call(Nodes& nodes, NodeRef callable, NodeRef arguments) {
  if (!arguments.is(Kind::tuple)) return std::nullopt;
  const auto items = arguments.items();
  switch (Nodes::fold_of(callable)) {
    case Fold::encode:
      return encoded(nodes, Kind::bytes, items);
    case Fold::bytes:
      if (items.empty()) return nodes.text(Kind::bytes, {});
      break;
    case Fold::byte_array:
      return byte_array(nodes, items);
    case Fold::set:
      return set(nodes, Kind::set, items);
    case Fold::frozen_set:
      return set(nodes, Kind::frozen_set, items);
    case Fold::new_object:
      if (!items.empty())
        return nodes.object(Object::Made::new_object, items[0], nodes.tuple(items.data() + 1, items.size() - 1));
      break;
    case Fold::new_object_ex:
      if (items.size() == 3) return nodes.object_with_keywords(items[0], items[1], items[2]);
      break;
    case Fold::none:
      break;
  }
  return std::nullopt;
}

}  // namespace tessera::pickle
