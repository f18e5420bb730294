#include "tensor/ops/rank_inputs.h"

#include <fmt/ranges.h>

#include <string>

#include "tessera/tensor/op.h"

namespace tessera::ops {

void agree_on_inputs(std::string_view op, const ProcessGroup& group, const std::vector<at::Tensor>& inputs,
                     const std::function<void()>& check) {
  group.check_call(fmt::format("op '{}'", op), [&](CallArguments& arguments) {
    check();
    std::vector<std::string> described;
    described.reserve(inputs.size());
    for (const at::Tensor& input : inputs) described.push_back(describe(input));
    arguments.add("inputs", fmt::format("({})", fmt::join(described, ", ")));
  });
}

}  // namespace tessera::ops
