#include "checkpoint/convert/nested.h"

#include "tessera/base/bytes.h"
#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

// Of an item of a list: a pointer, and its pickle.
constexpr std::uint64_t kItemBytes = 16;
constexpr std::int64_t kMaxListLength = std::int64_t{1} << 40;
constexpr std::size_t kMaxPathDepth = 200;

}  // namespace

Nested& Nested::child(const Key& item, const std::string* json, const std::string& name, ExpansionBudget& budget) {
  const Kind wanted = std::holds_alternative<std::string>(item) ? Kind::dict : Kind::list;
  if (kind == Kind::none) kind = wanted;
  if (kind != wanted) {
    fail(ErrorCode::corrupt, "the path of '{}' passes through a {}, expected a {} as in another path", printable(name),
         wanted == Kind::dict ? "dict" : "list",
         kind == Kind::leaf   ? "value"
         : kind == Kind::dict ? "dict"
                              : "list");
  }
  std::size_t at = 0;
  if (wanted == Kind::dict) {
    const std::string& text = json != nullptr ? *json : std::get<std::string>(item);
    if (json != nullptr && !positions_of_json_) positions_of_json_ = std::make_unique<TextMap<std::size_t>>();
    TextMap<std::size_t>& positions = json != nullptr ? *positions_of_json_ : positions_;
    const auto [found, is_new] = positions.try_emplace(text, children.size());
    if (is_new) {
      keys.push_back({text, json != nullptr});
      children.push_back(nullptr);
    }
    at = found->second;
  } else {
    const std::int64_t index = std::get<std::int64_t>(item);
    if (index < 0 || index >= kMaxListLength) {
      fail(ErrorCode::corrupt, "the path of '{}' has the list index {}, expected 0 to {}", printable(name), index,
           kMaxListLength - 1);
    }
    at = static_cast<std::size_t>(index);
    if (at >= children.size()) {
      if (!budget.charge((at + 1 - children.size()) * kItemBytes)) {
        fail(ErrorCode::corrupt, "the path of '{}' has the list index {}, expected lists of at most {} in all",
             printable(name), index, format_bytes(budget.limit_bytes()));
      }
      children.resize(at + 1);
    }
  }
  if (!children[at]) children[at] = std::make_unique<Nested>();
  return *children[at];
}

void Nested::set(const Path& path, std::size_t leaf_in, const std::string& name, ExpansionBudget& budget,
                 const PathKeys& keys_in) {
  if (path.size() > kMaxPathDepth) {
    fail(ErrorCode::corrupt, "the path of '{}' has {} parts, expected at most {}", printable(name), path.size(),
         kMaxPathDepth);
  }
  Nested* at = this;
  auto key = keys_in.begin();
  for (std::size_t i = 0; i < path.size(); ++i) {
    const bool has_key = key != keys_in.end() && key->part == i;
    at = &at->child(path[i], has_key && !key->json.empty() ? &key->json : nullptr, name, budget);
    if (has_key) ++key;
  }
  if (at->kind != Kind::none)
    fail(ErrorCode::corrupt, "the path of '{}' is taken, expected unique paths", printable(name));
  at->kind = Kind::leaf;
  at->leaf = leaf_in;
}

}  // namespace tessera::checkpoint
