#include "tessera/fsdp/tensors_in.h"

#include <torch/nn/utils/rnn.h>

namespace tessera::fsdp {

void visit_tensors(torch::nn::utils::rnn::PackedSequence& sequence, TensorVisitor visit) {
  at::Tensor data = sequence.data();
  if (!data.defined()) return;
  visit(data);
  if (data.is_same(sequence.data())) return;
  const auto follow = [&](const at::Tensor& indices) {
    return indices.defined() ? indices.to(data.device()) : indices;
  };
  sequence = torch::nn::utils::rnn::PackedSequence(data, sequence.batch_sizes(), follow(sequence.sorted_indices()),
                                                   follow(sequence.unsorted_indices()));
}

}  // namespace tessera::fsdp
