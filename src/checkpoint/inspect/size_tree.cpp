#include "tessera/checkpoint/inspect/size_tree.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>

namespace tessera::checkpoint {
namespace {

// Appends the parts of `text` between dots.
void split_at_dots(std::string_view text, std::vector<std::string>& parts) {
  for (;;) {
    const std::size_t dot = text.find('.');
    parts.emplace_back(text.substr(0, dot));
    if (dot == std::string_view::npos) return;
    text.remove_prefix(dot + 1);
  }
}

// Returns at most `depth` parts.
std::vector<std::string> parts_of(const std::string& name, const Path& path, std::size_t depth, bool joins_rest) {
  std::vector<std::string> parts;
  for (const Key& key : path) {
    if (const auto* text = std::get_if<std::string>(&key)) {
      split_at_dots(*text, parts);
    } else {
      parts.push_back(fmt::format("{}", std::get<std::int64_t>(key)));
    }
  }
  if (path.empty()) split_at_dots(name, parts);
  if (parts.size() <= depth) return parts;
  if (joins_rest) {
    for (std::size_t i = depth; i < parts.size(); ++i) parts[depth - 1] += "." + parts[i];
  }
  parts.resize(depth);
  return parts;
}

// A node while the tree grows.
struct Growing {
  std::uint64_t bytes = 0, tensors = 0, objects = 0;
  std::map<std::string, Growing, std::less<>> children;

  void add(std::uint64_t more_bytes, bool is_tensor) {
    bytes += more_bytes;
    ++(is_tensor ? tensors : objects);
  }

  SizeNode finish(const std::string& name) const {
    SizeNode node{name, bytes, tensors, objects, {}};
    for (const auto& [child_name, child] : children) node.children.push_back(child.finish(child_name));
    std::stable_sort(node.children.begin(), node.children.end(),
                     [](const SizeNode& a, const SizeNode& b) { return a.bytes > b.bytes; });
    return node;
  }
};

}  // namespace

SizeNode size_tree(const Checkpoint& checkpoint, const std::vector<std::size_t>& tensors,
                   const std::vector<std::size_t>& objects, std::size_t depth) {
  const std::size_t limit = std::clamp<std::size_t>(depth, 1, kMaxSizeTreeDepth);
  Growing root;
  const auto add = [&](const std::string& name, const Path& path, std::uint64_t bytes, bool is_tensor) {
    Growing* node = &root;
    node->add(bytes, is_tensor);
    for (const std::string& part : parts_of(name, path, limit, depth >= kMaxSizeTreeDepth)) {
      node = &node->children[part];
      node->add(bytes, is_tensor);
    }
  };
  for (const std::size_t i : tensors) {
    const TensorInfo& tensor = checkpoint.tensors()[i];
    add(tensor.name, tensor.path, tensor.size_bytes(), true);
  }
  for (const std::size_t i : objects) {
    add(checkpoint.objects()[i].name, checkpoint.objects()[i].path, 0, false);
  }
  return root.finish("");
}

}  // namespace tessera::checkpoint
