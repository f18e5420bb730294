#include "tensor/ops/rank_inputs.h"

#include <fmt/ranges.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <functional>
#include <string>

#include "tessera/base/error.h"
#include "tessera/tensor/op.h"

namespace tessera::ops {

void agree_on_inputs(std::string_view op, const ProcessGroup& group, const std::vector<at::Tensor>& inputs,
                     const std::function<void()>& check) {
  group.agree_on(fmt::format("op '{}'", op), check);
  std::vector<std::string> described;
  described.reserve(inputs.size());
  for (const at::Tensor& input : inputs) described.push_back(describe(input));
  const std::string mine = fmt::format("{}", fmt::join(described, ", "));
  // Compare hashes first; the descriptions rarely differ.
  const at::Tensor number = at::scalar_tensor(static_cast<std::int64_t>(std::hash<std::string>()(mine)), at::kLong);
  const at::Tensor numbers = at::empty({group.size()}, at::kLong);
  group.all_gather_into(numbers, number);
  if (numbers.eq(number).all().item<bool>()) return;
  const std::vector<Bytes> all = group.all_gather_bytes(as_bytes(mine));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    fail(ErrorCode::invalid_argument, "op '{}': inputs ({}) on rank 0 and ({}) on rank {}, expected the same sizes", op,
         as_text(all[0]), as_text(all[rank]), rank);
  }
}

}  // namespace tessera::ops
