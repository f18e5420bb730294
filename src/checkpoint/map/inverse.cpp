#include <algorithm>

#include "checkpoint/map/rules.h"
#include "tessera/base/cast.h"
#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

// Whether each value of `from` is one of `to`.
bool is_exact(DType from, DType to) {
  if (from == to) return true;
  const auto among = [&](std::initializer_list<DType> dtypes) {
    return std::ranges::find(dtypes, from) != dtypes.end();
  };
  switch (to) {
    case DType::float64:
      return among({DType::float32, DType::float16, DType::bfloat16, DType::float8_e4m3fn, DType::float8_e5m2,
                    DType::float8_e4m3fnuz, DType::float8_e5m2fnuz});
    case DType::float32:
      return among({DType::float16, DType::bfloat16, DType::float8_e4m3fn, DType::float8_e5m2, DType::float8_e4m3fnuz,
                    DType::float8_e5m2fnuz});
    case DType::float16:
    case DType::bfloat16:
      return among({DType::float8_e4m3fn, DType::float8_e5m2});
    default:
      return false;
  }
}

[[noreturn]] void lacks(std::string_view key, std::string_view what) {
  fail(ErrorCode::invalid_argument, "found no key '{}', expected {}: its inverse needs it", key, what);
}

// Of a tensor whose number of dimensions is not known.
void require_counted_from_first(std::int64_t dim) {
  if (dim >= 0) return;
  fail(ErrorCode::invalid_argument, "found dimension {}, expected it counted from the first: its inverse needs that",
       dim);
}

NameTemplate template_of(const InverseName& inverse, std::size_t groups, bool has_index) {
  return {inverse.to, groups, has_index};
}

// Makes the patterns of `result` from the templates of `rule`, and the other way round.
void invert_name(const MapRule& rule, MapRule& result) {
  const InverseName inverse = inverse_name(rule.match[0].text(), rule.to[0], rule.index);
  result.match = {Pattern(inverse.match)};
  result.to = {template_of(inverse, inverse.order.size(), rule.op == MapOp::stack)};
  result.index = inverse.index_group;
}

void invert_split(const MapRule& rule, MapRule& result) {
  result.op = MapOp::concat;
  result.match.clear();
  for (const NameTemplate& to : rule.to) {
    const InverseName inverse = inverse_name(rule.match[0].text(), to);
    if (!std::ranges::is_sorted(inverse.order)) {
      fail(ErrorCode::invalid_argument, "'{}' has groups in another order than the pattern, expected the same order",
           printable(to.text()));
    }
    result.match.emplace_back(inverse.match);
    result.to = {template_of(inverse, inverse.order.size(), false)};
  }
}

void invert_concat(const MapRule& rule, MapRule& result) {
  result.op = MapOp::split;
  result.to.clear();
  for (const Pattern& part : rule.match) {
    const InverseName inverse = inverse_name(part.text(), rule.to[0]);
    if (result.to.empty()) result.match = {Pattern(inverse.match)};
    if (inverse.match != result.match[0].text()) {
      fail(ErrorCode::invalid_argument, "the groups of '{}' are not those of '{}', expected the same",
           printable(part.text()), printable(rule.match[0].text()));
    }
    result.to.push_back(template_of(inverse, inverse.order.size(), false));
  }
}

MapRule inverted(const MapRule& rule) {
  MapRule result = rule;
  switch (rule.op) {
    case MapOp::rename:
      invert_name(rule, result);
      break;
    case MapOp::substitute:
      fail(ErrorCode::invalid_argument,
           "a substitution does not state which names it changes, expected an operation that does; use rename");
    case MapOp::drop:
      fail(ErrorCode::invalid_argument, "what it drops cannot be made again, expected rules that drop nothing");
    case MapOp::copy:
      if (rule.unless_exists) {
        fail(ErrorCode::invalid_argument,
             "which of the names existed before is not known, expected a copy without unless_exists");
      }
      // The copies are dropped.
      result.op = MapOp::drop;
      result.match = {Pattern(inverse_name(rule.match[0].text(), rule.to[0]).match)};
      result.to.clear();
      break;
    case MapOp::cast:
      if (!rule.from_dtype) lacks("from", "the dtype before");
      if (!is_exact(*rule.from_dtype, *rule.dtype)) {
        fail(ErrorCode::invalid_argument, "{} cannot represent all values of {}, expected a dtype that does",
             dtype_name(*rule.dtype), dtype_name(*rule.from_dtype));
      }
      std::swap(result.dtype, result.from_dtype);
      break;
    case MapOp::transpose:
      break;
    case MapOp::permute:
      for (std::size_t d = 0; d < rule.dims.size(); ++d) {
        const std::int64_t dim = rule.dims[d] < 0 ? rule.dims[d] + std::ssize(rule.dims) : rule.dims[d];
        if (dim < 0 || dim >= std::ssize(rule.dims)) {
          fail(ErrorCode::invalid_argument, "found dimension {}, expected each of {} once", rule.dims[d],
               rule.dims.size());
        }
        result.dims[static_cast<std::size_t>(dim)] = static_cast<std::int64_t>(d);
      }
      break;
    case MapOp::reshape:
      if (!rule.from) lacks("from", "the shape before");
      std::swap(result.sizes, result.from);
      break;
    case MapOp::unflatten:
      require_counted_from_first(rule.dims[0]);
      result.op = MapOp::flatten;
      result.dims = {rule.dims[0], rule.dims[0] + std::ssize(*rule.sizes) - 1};
      break;
    case MapOp::flatten:
      if (!rule.sizes) lacks("sizes", "the sizes of the dimensions before");
      require_counted_from_first(rule.dims[0]);
      result.op = MapOp::unflatten;
      result.dims = {rule.dims[0]};
      break;
    case MapOp::split:
      invert_split(rule, result);
      break;
    case MapOp::concat:
      if (!rule.sizes) lacks("sizes", "the sizes of the parts");
      invert_concat(rule, result);
      break;
    case MapOp::stack:
      invert_name(rule, result);
      result.op = MapOp::unstack;
      break;
    case MapOp::unstack:
      invert_name(rule, result);
      result.op = MapOp::stack;
      break;
  }
  return result;
}

}  // namespace

MapStage inverse_stage(const MapStage& stage, std::vector<std::string>& problems) {
  MapStage result = stage;
  result.name = "inverse of " + stage.name;
  result.rules.clear();
  if (stage.unmatched == Unmatched::drop) {
    problems.push_back(
        fmt::format("{}: \"unmatched\" is \"drop\", expected \"keep\" or \"error\": what it drops cannot be made again",
                    stage.name));
  }
  for (auto rule = stage.rules.rbegin(); rule != stage.rules.rend(); ++rule) {
    try {
      result.rules.push_back(inverted(*rule));
      result.rules.back().number = result.rules.size();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::invalid_argument) throw;
      problems.push_back(fmt::format("{} cannot be inverted: {}", stage.where(*rule), error.what()));
    }
  }
  return result;
}

}  // namespace tessera::checkpoint
