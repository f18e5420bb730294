// `tessera inspect --tree` and `--du`: sizes by prefix.

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands/inspect.h"
#include "cli/text/json_text.h"
#include "cli/text/text_table.h"
#include "tessera/base/bytes.h"
#include "tessera/checkpoint/report_json.h"

namespace tessera::cli {
namespace {

using checkpoint::SizeNode;
using Align = TextTable::Align;

std::vector<std::string> cells(const SizeNode& node, std::uint64_t total_bytes, std::string name) {
  const double share = total_bytes == 0 ? 0 : 100 * static_cast<double>(node.bytes) / static_cast<double>(total_bytes);
  return {format_bytes(node.bytes), fmt::format("{:.1f} %", share), std::move(name), fmt::to_string(node.tensors),
          fmt::to_string(node.objects)};
}

TextTable size_table() {
  return TextTable({{"BYTES", Align::right},
                    {"SHARE", Align::right},
                    {"NAME", Align::left, 16, true},
                    {"TENSORS", Align::right, 7},
                    {"OBJECTS", Align::right, 7}});
}

void add_tree(TextTable& table, const SizeNode& node, std::uint64_t total_bytes, std::size_t level) {
  for (const SizeNode& child : node.children) {
    table.add(cells(child, total_bytes, std::string(2 * level, ' ') + one_line(child.name)));
    add_tree(table, child, total_bytes, level + 1);
  }
}

struct Prefix {
  std::string name;
  const SizeNode* node = nullptr;
};

void list_prefixes(const SizeNode& node, const std::string& name, std::vector<Prefix>& prefixes) {
  for (const SizeNode& child : node.children) {
    const std::string full = name.empty() ? child.name : name + "." + child.name;
    prefixes.push_back({full, &child});
    list_prefixes(child, full, prefixes);
  }
}

std::vector<Prefix> sorted_prefixes(const SizeNode& root) {
  std::vector<Prefix> prefixes;
  list_prefixes(root, "", prefixes);
  std::stable_sort(prefixes.begin(), prefixes.end(),
                   [](const Prefix& a, const Prefix& b) { return a.node->bytes > b.node->bytes; });
  return prefixes;
}

}  // namespace

void print_size_tree(Session& session, const SizeNode& root) {
  TextTable table = size_table();
  table.add(cells(root, root.bytes, "total"));
  add_tree(table, root, root.bytes, 1);
  table.print(session.out);
}

void print_size_list(Session& session, const SizeNode& root) {
  TextTable table = size_table();
  table.add(cells(root, root.bytes, "total"));
  for (const Prefix& prefix : sorted_prefixes(root)) {
    table.add(cells(*prefix.node, root.bytes, one_line(prefix.name)));
  }
  table.print(session.out);
}

void print_size_tree_json(Session& session, const SizeNode& root) {
  session.out.print("{}\n", json_text(report_json(root), 2));
}

void print_size_list_json(Session& session, const SizeNode& root) {
  nlohmann::ordered_json prefixes = nlohmann::ordered_json::array();
  for (const Prefix& prefix : sorted_prefixes(root)) {
    prefixes.push_back({{"prefix", prefix.name},
                        {"bytes", prefix.node->bytes},
                        {"tensors", prefix.node->tensors},
                        {"objects", prefix.node->objects}});
  }
  const nlohmann::ordered_json json = {{"schema", checkpoint::json_schema("inspect-du")},
                                       {"bytes", root.bytes},
                                       {"tensors", root.tensors},
                                       {"objects", root.objects},
                                       {"prefixes", prefixes}};
  session.out.print("{}\n", json_text(json, 2));
}

}  // namespace tessera::cli
