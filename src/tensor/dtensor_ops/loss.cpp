#include "tensor/dtensor_ops/calls.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera::dtensor {

namespace {

// The targets of a loss, checked and without those that are ignored.
struct Targets {
  DTensor places;      // an ignored target is 0
  DTensor is_ignored;  // bool
  DTensor weights;     // of each target; 0 if it is ignored
  std::int64_t class_dim;
};

DTensor one_for_each(const DTensor& target, at::ScalarType dtype) { return to(eq(target, target), dtype); }

Targets targets_of(const char* op, const DTensor& x, const DTensor& target, const LossOptions& options) {
  const std::int64_t class_dim = x.dim() == 1 ? 0 : 1;
  Sizes expected = x.size();
  if (!expected.empty()) expected.erase(expected.begin() + class_dim);
  if (x.dim() == 0 || target.size() != expected || target.scalar_type() != at::kLong) {
    fail(ErrorCode::invalid_argument, "{} of {} and targets of size {} of {}: expected targets of size {} of Long", op,
         x.to_string(), shape_to_string(target.size()), c10::toString(target.scalar_type()), shape_to_string(expected));
  }
  if (options.weight && options.weight->size() != Sizes{x.size(class_dim)}) {
    fail(ErrorCode::invalid_argument, "{} of {} with weights of size {}: expected size [{}], one for each class", op,
         x.to_string(), shape_to_string(options.weight->size()), x.size(class_dim));
  }
  DTensor is_ignored = eq(target, options.ignore_index);
  DTensor places = masked_fill(target, is_ignored, 0);
  DTensor weights = options.weight ? view(index_select(*options.weight, 0, flatten(places)), target.size())
                                   : one_for_each(target, x.scalar_type());
  weights = masked_fill(weights, is_ignored, 0);
  return {std::move(places), std::move(is_ignored), std::move(weights), class_dim};
}

DTensor reduced(const DTensor& losses, const DTensor& weights, Reduction reduction) {
  if (reduction == Reduction::none) return losses;
  if (reduction == Reduction::sum) return sum(losses);
  return narrowed_as(losses, div(sum(widened(losses)), sum(widened(weights))));
}

// Returns the loss of each target.
DTensor losses_of(const DTensor& x, const Targets& targets) {
  const DTensor picked =
      squeeze(gather(x, targets.class_dim, unsqueeze(targets.places, targets.class_dim)), targets.class_dim);
  return masked_fill(neg(mul(picked, targets.weights)), targets.is_ignored, 0);
}

}  // namespace

DTensor nll_loss(const DTensor& x, const DTensor& target, const LossOptions& options) {
  const Targets targets = targets_of("nll_loss", x, target, options);
  return reduced(losses_of(x, targets), targets.weights, options.reduction);
}

DTensor cross_entropy(const DTensor& x, const DTensor& target, const LossOptions& options) {
  if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1)) {
    fail(ErrorCode::invalid_argument, "cross_entropy with label smoothing {}: expected 0 to 1",
         options.label_smoothing);
  }
  const Targets targets = targets_of("cross_entropy", x, target, options);
  const DTensor log_probabilities = log_softmax(x, targets.class_dim);
  const DTensor losses = losses_of(log_probabilities, targets);
  if (options.label_smoothing == 0) return reduced(losses, targets.weights, options.reduction);

  const std::int64_t classes = x.size(targets.class_dim);
  DTensor weighted = log_probabilities;
  if (options.weight) {
    Sizes per_class(x.size().size(), 1);
    per_class[static_cast<std::size_t>(targets.class_dim)] = classes;
    weighted = mul(weighted, view(*options.weight, per_class));
  }
  const DTensor smooth = masked_fill(neg(sum(weighted, {targets.class_dim})), targets.is_ignored, 0);
  const double smoothing = options.label_smoothing;
  return add(mul(reduced(losses, targets.weights, options.reduction), 1 - smoothing),
             mul(reduced(smooth, targets.weights, options.reduction), smoothing / static_cast<double>(classes)));
}

DTensor mse_loss(const DTensor& x, const DTensor& target, Reduction reduction) {
  DTensor squares = square(sub(x, target));
  if (reduction == Reduction::none) return squares;
  return reduction == Reduction::sum ? sum(squares) : mean(squares);
}

}  // namespace tessera::dtensor
