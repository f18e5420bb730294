#pragma once
/// \file
/// A handle to wait for units that a program gathers before it calls them.

#include <memory>
#include <vector>

namespace tessera::fsdp {

class FlatParamHandle;

/// A handle of the units that one call of `unshard` has started to gather. PyTorch: UnshardHandle.
class UnshardHandle {
 public:
  /// Creates a handle of no units.
  UnshardHandle() = default;
  /// Creates a handle of the units of `handles`, which are valid while `alive` is true.
  UnshardHandle(std::vector<FlatParamHandle*> handles, std::shared_ptr<const bool> alive);
  /// Blocks until the units are gathered. Does nothing if it was called before, or if the model was destroyed.
  void wait();

 private:
  std::vector<FlatParamHandle*> handles_;
  std::shared_ptr<const bool> alive_;
};

}  // namespace tessera::fsdp
