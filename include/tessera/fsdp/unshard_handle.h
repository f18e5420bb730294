#pragma once
/// \file
/// The result of a gather that a program starts before it is needed.

#include <memory>
#include <vector>

namespace tessera::fsdp {

class FlatParamHandle;

/// The units that one call of `unshard` has started to gather. PyTorch: UnshardHandle.
class UnshardHandle {
 public:
  /// Creates a handle of no units.
  UnshardHandle() = default;
  /// `handles` are valid while `alive` is true.
  UnshardHandle(std::vector<FlatParamHandle*> handles, std::shared_ptr<const bool> alive);
  /// Blocks until the units are gathered. Does nothing if it was called before, or if the model was destroyed.
  void wait();

 private:
  std::vector<FlatParamHandle*> handles_;
  std::shared_ptr<const bool> alive_;
};

}  // namespace tessera::fsdp
