// Rules of sums of products: matmul, linear and einsum.

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "tensor/dtensor_rules/rules.h"
#include "tessera/base/error.h"

namespace tessera::rules {

namespace {

using Labels = std::vector<int>;

std::optional<std::size_t> place_of(int label, const Labels& labels) {
  const auto found = std::find(labels.begin(), labels.end(), label);
  return found == labels.end() ? std::nullopt : std::optional(static_cast<std::size_t>(found - labels.begin()));
}

// Returns the labels of the factors, in order of appearance, without those that one factor has twice: the elements of
// its diagonal are not in one shard along both dimensions.
Labels shardable(const ProductLabels& labels) {
  Labels result;
  std::set<int> excluded;
  for (const Labels& factor : labels.factors) {
    for (const int label : factor) {
      if (std::count(factor.begin(), factor.end(), label) > 1) excluded.insert(label);
      if (!place_of(label, result)) result.push_back(label);
    }
  }
  std::erase_if(result, [&](int label) { return excluded.count(label) != 0; });
  return result;
}

std::map<int, std::int64_t> lengths_of(const char* op, std::span<const DTensor> inputs, const ProductLabels& labels) {
  std::map<int, std::int64_t> lengths;
  for (std::size_t i = 0; i < labels.factors.size(); ++i) {
    for (std::size_t d = 0; d < labels.factors[i].size(); ++d) {
      const std::int64_t mine = inputs[i].size()[d];
      std::int64_t& length = lengths.try_emplace(labels.factors[i][d], mine).first->second;
      if (mine != length && mine != 1 && length != 1) refuse_sizes(op, inputs, labels.expected_sizes);
      if (length == 1) length = mine;
    }
  }
  return lengths;
}

// Returns the placement of what is added to a result of `size`, so that the sum is placed as the result.
Placement of_addend(const DTensor& addend, const Sizes& size, const Placement& result) {
  if (!result.is_shard()) return result;
  const auto d = static_cast<std::size_t>(result.dim());
  const std::size_t before = size.size() - addend.size().size();
  if (d < before || addend.size()[d - before] != size[d]) return Placement::replicate();
  return Placement::strided_shard(static_cast<std::int64_t>(d - before), result.split_factor());
}

// Returns the split factors with which the factors are sharded along the label, 1 among them.
std::set<std::int64_t> split_factors(std::span<const DTensor> inputs, const ProductLabels& labels, int label) {
  std::set<std::int64_t> factors = {1};
  for (std::size_t i = 0; i < labels.factors.size(); ++i) {
    const auto place = place_of(label, labels.factors[i]);
    for (const Placement& placement : inputs[i].placements()) {
      if (place && placement.is_shard(static_cast<std::int64_t>(*place))) factors.insert(placement.split_factor());
    }
  }
  return factors;
}

}  // namespace

OpRule product(const char* op, std::span<const DTensor> inputs, const ProductLabels& labels) {
  const std::map<int, std::int64_t> lengths = lengths_of(op, inputs, labels);
  OpRule rule{{}, {}, /*may_shard=*/true};
  for (const int label : labels.result) rule.output_size.push_back(lengths.at(label));
  const std::size_t factors = labels.factors.size();
  const auto add = [&](Placements placements, const Placement& output) {
    for (std::size_t i = factors; i < inputs.size(); ++i)
      placements.push_back(of_addend(inputs[i], rule.output_size, output));
    rule.strategies.push_back({std::move(placements), output});
  };
  add(Placements(factors), Placement::replicate());
  for (const int label : shardable(labels)) {
    const auto to = place_of(label, labels.result);
    for (const std::int64_t split_factor : split_factors(inputs, labels, label)) {
      const auto shard = [&](std::size_t dim) {
        return Placement::strided_shard(static_cast<std::int64_t>(dim), split_factor);
      };
      Placements placements(factors);
      for (std::size_t i = 0; i < factors; ++i) {
        const auto place = place_of(label, labels.factors[i]);
        if (place && inputs[i].size()[*place] == lengths.at(label)) placements[i] = shard(*place);
      }
      add(std::move(placements), to ? shard(*to) : Placement::partial());
    }
  }
  for (const ReduceOp reduce_op : {ReduceOp::sum, ReduceOp::average}) {
    for (std::size_t i = 0; i < factors; ++i) {
      Placements placements(factors);
      placements[i] = Placement::partial(reduce_op);
      add(std::move(placements), Placement::partial(reduce_op));
    }
  }
  return rule;
}

OpRule matmul(std::span<const DTensor> inputs) {
  constexpr int kRow = -1, kColumn = -2, kSummed = -3;  // other dimensions: their place from the end
  const auto labels_of = [](std::size_t dims, int last_but_one, int last) {
    Labels labels;
    for (std::size_t d = 0; d + 2 < dims; ++d) labels.push_back(static_cast<int>(dims - d));
    labels.insert(labels.end(), {last_but_one, last});
    return labels;
  };
  const std::size_t a = inputs[0].size().size(), b = inputs[1].size().size();
  if (a < 2 || b < 2 || inputs[0].size().back() != inputs[1].size()[b - 2]) {
    refuse_sizes("matmul", inputs, "[..., m, k] and [..., k, n]");
  }
  return product("matmul", inputs,
                 {{labels_of(a, kRow, kSummed), labels_of(b, kSummed, kColumn)},
                  labels_of(std::max(a, b), kRow, kColumn),
                  "[..., m, k] and [..., k, n] whose other dimensions broadcast to each other"});
}

OpRule linear(std::span<const DTensor> inputs) {
  const Sizes &x = inputs[0].size(), &weight = inputs[1].size();
  const bool fits = !x.empty() && weight.size() == 2 && x.back() == weight[1] &&
                    (inputs.size() == 2 || inputs[2].size() == Sizes{weight[0]});
  if (!fits) {
    refuse_sizes("linear", inputs,
                 inputs.size() == 2 ? "[..., in] and [out, in]" : "[..., in], [out, in] and a bias [out]");
  }
  constexpr int kIn = -1, kOut = -2;
  Labels of_x;
  for (std::size_t d = 0; d + 1 < x.size(); ++d) of_x.push_back(static_cast<int>(d));
  Labels of_result = of_x;
  of_x.push_back(kIn);
  of_result.push_back(kOut);
  return product("linear", inputs, {{of_x, {kOut, kIn}}, of_result});
}

namespace {

// What an ellipsis stands for has labels above those of letters.
constexpr int kEllipsis = 256;

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

class EinsumParser {
 public:
  EinsumParser(std::string_view equation, const std::vector<std::size_t>& dims) : equation_(equation), dims_(dims) {
    for (const char c : equation) {
      if (c != ' ') text_ += c;
    }
  }

  ProductLabels parse() {
    const std::size_t arrow = text_.find("->");
    const std::string inputs = text_.substr(0, arrow);
    ProductLabels labels;
    labels.expected_sizes = "equal lengths, or 1, of the dimensions of one letter or of one place of the ellipsis";
    std::size_t begin = 0;
    while (begin <= inputs.size()) {
      const std::size_t end = std::min(inputs.find(',', begin), inputs.size());
      if (labels.factors.size() == dims_.size()) refuse_expecting("one term for each tensor");
      labels.factors.push_back(term(inputs.substr(begin, end - begin), dims_[labels.factors.size()]));
      begin = end + 1;
    }
    if (labels.factors.size() != dims_.size()) refuse_expecting("one term for each tensor");
    labels.result = arrow == std::string::npos ? implied(labels.factors) : result(text_.substr(arrow + 2), labels);
    return labels;
  }

 private:
  [[noreturn]] void refuse_expecting(const char* expected) const {
    fail(ErrorCode::invalid_argument, "einsum equation \"{}\" of {} tensors: expected {}", equation_, dims_.size(),
         expected);
  }

  // Splits a term at its ellipsis; without one, `after` is empty.
  struct Term {
    Labels before, after;
    bool has_ellipsis = false;
  };
  Term split(const std::string& text) const {
    Term term;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (is_letter(text[i])) {
        (term.has_ellipsis ? term.after : term.before).push_back(text[i]);
      } else if (text.compare(i, 3, "...") == 0 && !term.has_ellipsis) {
        term.has_ellipsis = true;
        i += 2;
      } else {
        refuse_expecting("letters and one ellipsis in a term");
      }
    }
    return term;
  }

  static Labels joined(const Term& term, std::size_t ellipsis) {
    Labels labels = term.before;
    for (std::size_t i = ellipsis; i > 0; --i) labels.push_back(kEllipsis + static_cast<int>(i));
    labels.insert(labels.end(), term.after.begin(), term.after.end());
    return labels;
  }

  Labels term(const std::string& text, std::size_t dims) {
    const Term term = split(text);
    const std::size_t letters = term.before.size() + term.after.size();
    if (letters > dims || (letters < dims && !term.has_ellipsis)) refuse_expecting("a letter for each dimension");
    longest_ellipsis_ = std::max(longest_ellipsis_, dims - letters);
    return joined(term, dims - letters);
  }

  // The letters that appear once, in order of the alphabet, after what the ellipses stand for.
  Labels implied(const std::vector<Labels>& factors) const {
    std::map<int, int> counts;
    for (const Labels& factor : factors) {
      for (const int label : factor) ++counts[label];
    }
    Term term;
    for (const auto& [label, count] : counts) {
      if (label < kEllipsis && count == 1) term.after.push_back(label);
    }
    return joined(term, longest_ellipsis_);
  }

  Labels result(const std::string& text, const ProductLabels& labels) const {
    const Term term = split(text);
    if (longest_ellipsis_ > 0 && !term.has_ellipsis) refuse_expecting("an ellipsis in the result as in the terms");
    Labels result = joined(term, longest_ellipsis_);
    for (const int label : result) {
      const bool is_known = std::any_of(labels.factors.begin(), labels.factors.end(),
                                        [&](const Labels& factor) { return place_of(label, factor).has_value(); });
      if (!is_known || std::count(result.begin(), result.end(), label) != 1)
        refuse_expecting("letters of the terms in the result, each once");
    }
    return result;
  }

  std::string_view equation_;
  const std::vector<std::size_t>& dims_;
  std::string text_;
  std::size_t longest_ellipsis_ = 0;
};

}  // namespace

ProductLabels einsum_labels(std::string_view equation, const std::vector<std::size_t>& dims) {
  return EinsumParser(equation, dims).parse();
}

}  // namespace tessera::rules
