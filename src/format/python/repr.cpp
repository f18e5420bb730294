#include <algorithm>

#include "format/pickle/walk.h"
#include "format/python/text.h"
#include "tessera/format/internal/python_meaning.h"
#include "tessera/format/python_value.h"

namespace tessera::pickle {

namespace {

class Repr {
 public:
  Repr(Walk& walk, std::size_t limit) : walk_(walk), limit_(limit) {}

  std::string of(NodeRef value) {
    put_value(value);
    if (out_.size() > limit_) {
      out_.resize(whole_characters(limit_));
      out_ += "...";
    }
    return std::move(out_);
  }

 private:
  bool is_full() const { return out_.size() > limit_; }
  std::size_t left() const { return limit_ - std::min(limit_, out_.size()); }

  // Returns `size`, or less if a character would be split.
  std::size_t whole_characters(std::size_t size) const {
    while (size > 0 && (static_cast<unsigned char>(out_[size]) & 0xc0) == 0x80) --size;
    return size;
  }

  void put_value(NodeRef v) {
    if (is_full()) return;
    switch (meaning_of(v)) {
      case Meaning::plain:
        return put_plain(v);
      case Meaning::ordered_dict:
        return put_ordered_dict(v);
      case Meaning::size:
        return put_container(v, "torch.Size([", "])", size_items(v), {});
      case Meaning::dtype:
        out_ += dtype_text(v);
        return;
      case Meaning::device:
        return put_device(v);
      case Meaning::complex: {
        const Complex complex = complex_of(v);
        out_ += complex_repr(complex.real, complex.imaginary);
        return;
      }
      case Meaning::opaque:
        return put_opaque(v);
    }
  }

  void put_plain(NodeRef v) {
    switch (v.kind()) {
      case Kind::boolean:
        out_ += v.boolean() ? "True" : "False";
        return;
      case Kind::big_integer:
        walk_.copy_text(v.big_integer(), std::min(3 * v.big_integer().size(), left()));
        [[fallthrough]];
      case Kind::integer:
        out_ += integer_to_decimal(v, left());
        return;
      case Kind::floating:
        out_ += float_repr(v.floating());
        return;
      case Kind::string:
        walk_.copy_text(v.string(), std::min(v.string().size(), left()));
        out_ += string_repr(v.string(), left());
        return;
      case Kind::bytes:
        walk_.copy_text(v.bytes(), std::min(v.bytes().size(), left()));
        out_ += bytes_repr(v.bytes(), left());
        return;
      case Kind::byte_array:
        walk_.copy_text(v.bytes(), std::min(v.bytes().size(), left()));
        out_ += byte_array_repr(v.bytes(), left());
        return;
      case Kind::list:
        return put_container(v, "[", "]", v.items(), {});
      case Kind::tuple:
        return put_container(v, "(", v.items().size() == 1 ? ",)" : ")", v.items(), {});
      case Kind::dict:
        return put_container(v, "{", "}", {}, v.pairs());
      case Kind::set:
        if (v.items().empty()) break;
        return put_container(v, "{", "}", v.items(), {}, "set(...)");
      case Kind::frozen_set:
        if (v.items().empty()) break;
        return put_container(v, "frozenset({", "})", v.items(), {}, "frozenset(...)");
      default:
        break;
    }
    out_ += v.is_none() ? "None" : v.is(Kind::set) ? "set()" : "frozenset()";
  }

  // `inside_itself` replaces the container within itself; by default its brackets around "...".
  void put_container(NodeRef v, std::string_view open, std::string_view close, std::span<const NodeRef> items,
                     std::span<const Pair> pairs, std::string_view inside_itself = {}) {
    const Walk::Step step(walk_, v, items.size() + 2 * pairs.size());
    if (!step.entered()) {
      if (inside_itself.empty()) {
        out_.append(1, open.front()).append("...").append(1, close.back());
      } else {
        out_ += inside_itself;
      }
      return;
    }
    out_ += open;
    put_items(items);
    put_pairs(pairs);
    out_ += close;
  }

  void put_items(std::span<const NodeRef> items) {
    for (std::size_t i = 0; i < items.size() && !is_full(); ++i) {
      if (i != 0) out_ += ", ";
      put_value(items[i]);
    }
  }

  void put_pairs(std::span<const Pair> pairs) {
    for (std::size_t i = 0; i < pairs.size() && !is_full(); ++i) {
      if (i != 0) out_ += ", ";
      put_value(pairs[i].key);
      out_ += ": ";
      put_value(pairs[i].value);
    }
  }

  void put_ordered_dict(NodeRef v) {
    const auto pairs = v.object().dict_items();
    if (pairs.empty()) {
      out_ += "OrderedDict()";
    } else {
      put_container(v, "OrderedDict({", "})", {}, pairs, "...");
    }
  }

  void put_device(NodeRef v) {
    const Device device = device_of(v);
    walk_.copy_text(device.type, std::min(device.type.size(), left()));
    out_ += "device(type=" + string_repr(device.type, left());
    if (!device.index.is_none()) out_ += ", index=" + integer_to_decimal(device.index);
    out_ += ")";
  }

  void put_opaque(NodeRef v) {
    out_ += "<";
    if (v.is(Kind::persistent_id)) {
      out_ += "persistent id ";
      const Walk::Step step(walk_, v, 1);
      if (step.entered()) {
        put_value(v.persistent_id());
      } else {
        out_ += "...";
      }
    } else if (v.is(Kind::taken)) {
      out_ += kind_name(v.kind());
    } else if (v.is(Kind::global) || v.object().made == Object::Made::extension) {
      out_ += callable_name(v);
    } else {
      out_ += callable_name(v.object().callable) + "(...)";
    }
    out_ += ">";
  }

  Walk& walk_;
  std::size_t limit_;
  std::string out_;
};

}  // namespace

std::string repr(NodeRef value, std::size_t limit) {
  Walk walk("repr of a pickled value");
  return Repr(walk, limit).of(value);
}

std::string repr_in(Walk& walk, NodeRef value) { return Repr(walk, SIZE_MAX).of(value); }

}  // namespace tessera::pickle
