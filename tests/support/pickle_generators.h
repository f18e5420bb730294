#pragma once
// Random inert trees.

#include <rapidcheck.h>

#include <bit>
#include <string>
#include <vector>

#include "tessera/format/pickle_value.h"

namespace tessera::testing {

struct RandomTree {
  pickle::Tree tree;
  std::vector<pickle::NodeRef> made;  // nodes that may be used again and so be shared
  bool with_opaque = true;

  static std::size_t below(std::size_t end) { return *rc::gen::resize(1000, rc::gen::inRange<std::size_t>(0, end)); }

  static std::string text() {
    static const std::vector<std::string> pieces = {"a",
                                                    "'",
                                                    "\"",
                                                    "\\",
                                                    "\n",
                                                    std::string(1, '\0'),
                                                    "\x7f",
                                                    "\xc3\xa9",
                                                    "\xed\xa0\x80",
                                                    "\xf0\x9f\x98\x80",
                                                    "__tessera__",
                                                    "model.weight"};
    std::string result;
    for (std::size_t i = below(4); i > 0; --i) result += pieces[below(pieces.size())];
    return below(10) == 0 ? result + std::string(300, 'x') : result;
  }

  static Bytes bytes() { return *rc::gen::resize(20, rc::gen::arbitrary<Bytes>()); }

  pickle::NodeRef number() {
    switch (below(4)) {
      case 0:
        return tree.make_floating(std::bit_cast<double>(*rc::gen::resize(100, rc::gen::arbitrary<std::uint64_t>())));
      case 1:
        return tree.make_floating(static_cast<double>(below(2000)) / 8 - 100);
      case 2:
        return tree.make_big_integer(bytes());
      default:
        return tree.make_integer(static_cast<std::int64_t>(below(70'000)) - 300);
    }
  }

  pickle::NodeRef atom() {
    switch (below(6)) {
      case 0:
        return {};
      case 1:
        return tree.make_boolean(below(2) == 0);
      case 2:
        return tree.make_string(text());
      case 3:
        return tree.make_bytes(bytes());
      case 4:
        return tree.make_byte_array(bytes());
      default:
        return number();
    }
  }

  pickle::NodeRef call(std::string_view module, std::string_view name, const std::vector<pickle::NodeRef>& arguments) {
    return tree.make_object(pickle::Object::Made::reduce, tree.make_global(module, name), tree.make_tuple(arguments));
  }

  pickle::NodeRef understood_call() {
    switch (below(4)) {
      case 0:
        return tree.make_global("torch", below(2) == 0 ? "float32" : "int64");
      case 1:
        return call("torch", "Size", {tree.make_tuple(std::vector<pickle::NodeRef>(below(4), tree.make_integer(7)))});
      case 2:
        return call("torch", "device", {tree.make_string("cuda"), tree.make_integer(1)});
      default:
        return call("builtins", "complex", {tree.make_floating(-0.0), tree.make_floating(1e300)});
    }
  }

  std::vector<pickle::NodeRef> values(std::size_t count, int depth) {
    std::vector<pickle::NodeRef> result;
    for (std::size_t i = 0; i < count; ++i) result.push_back(value(depth - 1));
    return result;
  }

  pickle::NodeRef opaque(int depth) {
    using Made = pickle::Object::Made;
    const pickle::NodeRef callable = tree.make_global("pkg.module", below(2) == 0 ? "Class" : "function");
    pickle::NodeRef object;
    switch (below(7)) {
      case 0:
        return callable;
      case 1:
        return tree.make_persistent_id(value(depth - 1));
      case 2:
        object = tree.make_object(Made::new_object, callable, tree.make_tuple(values(below(3), depth)));
        break;
      case 3:
        object =
            tree.make_object(Made::new_object_ex, callable, tree.make_tuple(values(below(2), depth)), tree.make_dict());
        break;
      case 4:
        object = tree.make_object(Made::instance, callable, tree.make_tuple(values(below(5), depth)));
        break;
      case 5:
        object = tree.make_object(Made::extension, tree.make_integer(static_cast<std::int64_t>(1 + below(70'000))), {});
        break;
      default:
        object = tree.make_object(Made::reduce, callable, tree.make_tuple(values(below(3), depth)));
        break;
    }
    tree.append(object, values(below(3), depth));
    tree.set_items(object, values(2 * below(2), depth));
    for (std::size_t i = below(3); i > 0; --i) tree.set_state(object, value(depth - 1));
    return object;
  }

  pickle::NodeRef container(int depth) {
    switch (below(8)) {
      case 0:
        return tree.make_list(values(below(4), depth));
      case 1:
      case 2:
        return tree.make_tuple(values(below(6), depth));
      case 3:
      case 4: {
        const pickle::NodeRef dict = tree.make_dict();
        for (std::size_t i = below(4); i > 0; --i) {
          const pickle::NodeRef both[] = {below(3) == 0 ? atom() : tree.make_string(text()), value(depth - 1)};
          tree.set_items(dict, both);
        }
        return dict;
      }
      case 5: {
        const pickle::NodeRef set = tree.make_set();
        tree.append(set, std::vector<pickle::NodeRef>{atom(), tree.make_tuple(std::vector{atom()})});
        return set;
      }
      case 6:
        return tree.make_frozen_set(std::vector<pickle::NodeRef>{atom(), tree.make_frozen_set({})});
      default: {
        const pickle::NodeRef dict = call("collections", "OrderedDict", {});
        tree.set_items(dict, values(2 * below(3), depth));
        return dict;
      }
    }
  }

  pickle::NodeRef value(int depth) {
    if (depth <= 0 || below(3) == 0) return atom();
    if (!made.empty() && below(5) == 0) return made[below(made.size())];
    const std::size_t kind = below(with_opaque ? 6 : 5);
    const pickle::NodeRef result = kind == 0 ? understood_call() : kind == 5 ? opaque(depth) : container(depth);
    made.push_back(result);
    return result;
  }
};

}  // namespace tessera::testing
