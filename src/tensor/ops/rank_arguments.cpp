#include "tensor/ops/rank_arguments.h"

#include <fmt/ranges.h>

namespace tessera::ops {

void agree_on_arguments(std::string_view op, const ProcessGroup& group, const std::vector<std::string>& arguments,
                        FunctionRef<void()> check) {
  group.check_call(fmt::format("op '{}'", op), [&](CallArguments& compared) {
    check();
    compared.add("arguments", fmt::format("({})", fmt::join(arguments, ", ")));
  });
}

}  // namespace tessera::ops
