#pragma once
/// \file
/// A scope in which partial mesh dimensions are reduced one after the other.
///
/// If a mesh has a group along several partial mesh dimensions, a redistribution reduces them in one collective. This
/// changes the order in which elements are added, and so the last bits of sums. In this scope, sums have the same bits
/// whether or not the mesh has the group.
///
///     const SeparateReductions separately;
///     x.redistribute();  // one all-reduce for each partial mesh dimension
///
/// Covers redistributions that this thread starts, also those of ops, but not those of a backward pass on other
/// threads. All ranks must be in the scope or none. PyTorch: disable_redistribute_transform_optimization in
/// torch/distributed/tensor/_redistribute.py.

namespace tessera {

/// The scope, from construction to destruction. Destroy scopes in reverse order of creation.
class SeparateReductions {
 public:
  SeparateReductions();
  ~SeparateReductions();
  SeparateReductions(const SeparateReductions&) = delete;
  SeparateReductions& operator=(const SeparateReductions&) = delete;

 private:
  bool outer_;
};

}  // namespace tessera
