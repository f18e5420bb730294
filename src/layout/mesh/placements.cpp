#include "tessera/layout/placements.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "tessera/base/error.h"

namespace tessera {

namespace {

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

// Returns what is within "name(...)"; nullopt for another name.
std::optional<std::string_view> argument_of(std::string_view name, std::string_view text) {
  if (text.size() < name.size() + 2 || text.substr(0, name.size()) != name) return std::nullopt;
  if (text[name.size()] != '(' || text.back() != ')') return std::nullopt;
  return text.substr(name.size() + 1, text.size() - name.size() - 2);
}

std::optional<std::int64_t> number(std::string_view text) {
  text = trimmed(text);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<Placement> placement_of(std::string_view text) {
  if (text == "R") return Placement::replicate();
  if (const auto dim = argument_of("S", text)) {
    const auto of = number(*dim);
    return of ? std::optional(Placement::shard(*of)) : std::nullopt;
  }
  if (const auto both = argument_of("_S", text)) {
    const std::size_t comma = std::min(both->find(','), both->size());
    const auto dim = number(both->substr(0, comma));
    const auto factor = number(both->substr(std::min(comma + 1, both->size())));
    if (!dim || !factor || *factor < 1) return std::nullopt;
    return Placement::strided_shard(*dim, *factor);
  }
  if (const auto op = argument_of("P", text)) {
    for (const ReduceOp each : {ReduceOp::sum, ReduceOp::average, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
      if (trimmed(*op) == to_string(each)) return Placement::partial(each);
    }
  }
  return std::nullopt;
}

}  // namespace

Placement parse_placement(std::string_view text) {
  if (const std::optional<Placement> placement = placement_of(trimmed(text))) return *placement;
  fail(ErrorCode::invalid_argument,
       "placement \"{}\": expected R, S(dim), _S(dim, factor) or P(sum|avg|product|min|max)", printable(text));
}

Placements parse_placements(std::string_view text) {
  std::string_view rest = trimmed(text);
  const bool opens = !rest.empty() && rest.front() == '[', closes = !rest.empty() && rest.back() == ']';
  if (opens != closes) {
    fail(ErrorCode::invalid_argument, "placements \"{}\": expected both brackets of a list or none", printable(text));
  }
  if (opens) rest = trimmed(rest.substr(1, rest.size() - 2));
  Placements placements;
  while (!rest.empty()) {
    std::size_t end = 0;
    for (int depth = 0; end < rest.size() && (rest[end] != ',' || depth > 0); ++end) {
      if (rest[end] == '(') ++depth;
      if (rest[end] == ')') --depth;
    }
    placements.push_back(parse_placement(rest.substr(0, end)));
    if (end == rest.size()) break;
    rest.remove_prefix(end + 1);
    if (trimmed(rest).empty()) parse_placement(rest);  // throws: nothing follows the comma
  }
  return placements;
}

bool mixes_partials(std::span<const Placement> placements) {
  const auto adds = [](ReduceOp op) { return op == ReduceOp::sum || op == ReduceOp::average; };
  const auto first =
      std::find_if(placements.begin(), placements.end(), [](const Placement& p) { return p.is_partial(); });
  return std::any_of(first, placements.end(), [&](const Placement& p) {
    if (!p.is_partial() || p.reduce_op() == first->reduce_op()) return false;
    return !adds(p.reduce_op()) || !adds(first->reduce_op());
  });
}

}  // namespace tessera
