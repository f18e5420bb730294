#pragma once
// A built-in op: the Op that a function of tessera::ops calls and that op_of() returns for the function.

#include <string>
#include <string_view>
#include <utility>

#include "tessera/tensor/op.h"

namespace tessera::ops {

template <typename Signature>
class BuiltIn : public Op<Signature> {
 public:
  BuiltIn(Signature* function, std::string name, typename Op<Signature>::Function implementation)
      : Op<Signature>(std::move(name), std::move(implementation)) {
    detail::built_in_ops<Signature>().emplace(function, this);
  }
  // Implemented only for specs of one kind.
  BuiltIn(Signature* function, std::string name, std::string_view kind, typename Op<Signature>::Function implementation)
      : Op<Signature>(std::move(name), kind, std::move(implementation)) {
    detail::built_in_ops<Signature>().emplace(function, this);
  }
};

}  // namespace tessera::ops
