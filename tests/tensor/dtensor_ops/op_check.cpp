#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/chaos.h"
#include "tensor/dtensor_ops/op_cases.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::testing {

namespace {

// What ATen gives for an op.
struct OnFullTensors {
  std::vector<at::Tensor> inputs;  // with gradients
  at::Tensor result, weights;      // weights of the result in the loss

  explicit OnFullTensors(const OpCase& op) {
    for (const Sizes& size : op.sizes) {
      inputs.push_back(at::sin(indexed(size).add(static_cast<double>(inputs.size()) * 7))
                           .add(1.5)
                           .set_requires_grad(op.has_gradient));
    }
    result = op.aten(inputs);
    weights = at::cos(indexed(result.sizes().vec()));
    if (op.has_gradient) loss(result).backward();
    result = result.detach();
  }
  at::Tensor loss(const at::Tensor& of) const { return (of * weights).sum(); }
};

// Passes inputs with these placements.
void expect_same(const OpCase& op, const OnFullTensors& expected, const DeviceMesh& mesh,
                 const std::vector<Placements>& placements) {
  std::vector<at::Tensor> leaves;
  std::vector<DTensor> inputs;
  std::string shown;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    const MeshLayout layout(op.sizes[i], mesh.shape(), placements[i]);
    leaves.push_back(local_of(expected.inputs[i], layout, *mesh.coordinate()).set_requires_grad(op.has_gradient));
    inputs.push_back(DTensor::from_local(leaves[i], mesh, layout.placements(), {op.sizes[i]}));
    shown += to_string(layout.placements()) + " ";
  }
  const DTensor result = op.ours(inputs);
  ASSERT_EQ(result.scalar_type(), expected.result.scalar_type()) << op.name << " of " << shown;
  const at::Tensor found = result.full_tensor();
  ASSERT_EQ(found.sizes(), expected.result.sizes()) << op.name << " of " << shown;
  ASSERT_TRUE(at::allclose(found, expected.result, 1e-10, 1e-12))
      << op.name << " of " << shown << "as " << result.to_string() << found << expected.result;
  if (!op.has_gradient) return;
  expected.loss(found).backward();
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const at::Tensor gradient = part_of(expected.inputs[i].grad(), inputs[i].layout(), *mesh.coordinate());
    ASSERT_TRUE(leaves[i].grad().defined()) << op.name << " of " << shown;
    ASSERT_TRUE(at::allclose(leaves[i].grad(), gradient, 1e-9, 1e-11))
        << op.name << " of " << shown << ", gradient of " << i << leaves[i].grad() << gradient;
  }
}

void expect_same_for_all_placements(const OpCase& op, const OnFullTensors& expected, const DeviceMesh& mesh) {
  std::vector<std::vector<Placements>> choices;
  for (const Sizes& size : op.sizes) {
    const Placements some = size.empty()      ? Placements{R, P}
                            : size.size() > 1 ? Placements{R, S0, S1, P}
                                              : Placements{R, S0, P};
    choices.push_back(cross(some, mesh.shape().size()));
  }
  std::vector<std::size_t> at(choices.size(), 0);
  for (;;) {
    std::vector<Placements> placements;
    for (std::size_t i = 0; i < choices.size(); ++i) placements.push_back(choices[i][at[i]]);
    expect_same(op, expected, mesh, placements);
    if (::testing::Test::HasFatalFailure()) return;
    // Skip ahead: a sample of many combinations.
    std::size_t i = 0;
    const std::size_t stride = (mesh.ndim() > 1 && choices.size() > 1 ? 37 : 1) * stride_if_sanitized(11);
    for (std::size_t skip = stride; skip > 0; --skip) {
      for (i = 0; i < at.size() && ++at[i] == choices[i].size(); ++i) at[i] = 0;
      if (i == at.size()) return;
    }
  }
}

// Returns `placements` if they fit a tensor of `dims` dimensions, else those of a replicated tensor.
Placements fitting(const Placements& placements, std::size_t dims) {
  const bool fits = std::all_of(placements.begin(), placements.end(), [&](const Placement& placement) {
    return !placement.is_shard() || placement.dim() < static_cast<std::int64_t>(dims);
  });
  return fits ? placements : Placements(placements.size());
}

}  // namespace

void expect_as_on_full_tensors(const std::vector<OpCase>& ops, const Sizes& shape) {
  std::vector<OnFullTensors> expected;
  expected.reserve(ops.size());
  for (const OpCase& op : ops) expected.emplace_back(op);
  run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, shape);
    for (std::size_t i = 0; i < ops.size(); ++i) expect_same_for_all_placements(ops[i], expected[i], mesh);
  });
}

void expect_as_on_full_tensors_if_strided(const std::vector<OpCase>& ops) {
  const Placement of_rows = Placement::strided_shard(0, 2), of_columns = Placement::strided_shard(1, 2),
                  average = Placement::partial(ReduceOp::average);
  const std::vector<Placements> choices = {{of_rows, S0}, {of_columns, S1}, {of_rows, S1},
                                           {of_rows, R},  {R, of_columns},  {average, P}};
  std::vector<OnFullTensors> expected;
  expected.reserve(ops.size());
  for (const OpCase& op : ops) expected.emplace_back(op);
  run_local(4, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2});
    SampleIfSanitized sample(7);
    for (std::size_t i = 0; i < ops.size(); ++i) {
      for (const Placements& choice : choices) {
        if (!sample.takes_next()) continue;
        std::vector<Placements> placements;
        for (const Sizes& size : ops[i].sizes) placements.push_back(fitting(choice, size.size()));
        expect_same(ops[i], expected[i], mesh, placements);
      }
    }
  });
}

}  // namespace tessera::testing
