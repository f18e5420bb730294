#pragma once
/// \file
/// A scope in which ops do not redistribute their inputs, so that every redistribution is one that the program asks
/// for.
///
///     const ExplicitRedistributionContext context;
///     dtensor::matmul(sharded, other);                      // throws if `sharded` had to be gathered
///     dtensor::matmul(sharded.redistribute(), other);
///
/// Covers ops on DTensors that this thread calls, and in a backward pass that this thread runs (on CPU) the gradients
/// of what an op redistributed in forward, unless a scope permitted that. Does not cover redistribute() and
/// full_tensor() with their gradients, what a parallel layer does to its input and result, or the sum of the ranks'
/// gradients of a replicated input, which is a part of an op. All ranks must be in the same scopes. PyTorch:
/// ExplicitRedistributionContext in torch/distributed/tensor/_utils.py.

#include <functional>
#include <string>

namespace tessera {

struct ExplicitRedistributionOptions {
  bool enable = true;   ///< false permits redistributions again, within another scope
  bool strict = false;  ///< also refuses redistributions that send nothing
  /// If set, is called with the message instead of throwing it.
  std::function<void(const std::string&)> warn = {};
};

/// A scope in which an op of this thread that would redistribute an input, or its gradient in backward, throws
/// `Error(invalid_argument)` instead, on every rank and before anything is sent. If scopes are nested, the innermost
/// applies. Destroy them in reverse order.
class ExplicitRedistributionContext {
 public:
  explicit ExplicitRedistributionContext(ExplicitRedistributionOptions options = {});
  ~ExplicitRedistributionContext();
  ExplicitRedistributionContext(const ExplicitRedistributionContext&) = delete;
  ExplicitRedistributionContext& operator=(const ExplicitRedistributionContext&) = delete;

 private:
  friend class ExplicitRedistributionCheck;
  ExplicitRedistributionOptions options_;
  const ExplicitRedistributionContext* outer_;
};

}  // namespace tessera
