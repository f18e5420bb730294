/// \file
/// Repeats the cases that make_dtensor_values.py recorded with PyTorch's DTensor: `dtensor_values FILE...` runs each on
/// the same number of ranks and compares; see cases.h. Loads each tensor of a checkpoint that PyTorch wrote under every
/// placement on other meshes, and saves them again as FILE.resaved.

#include "interop/programs/cases.h"
#include "tensor/mesh_support.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"
#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/dtensor_ops/convolution.h"
#include "tessera/tensor/dtensor_ops/normalization.h"

namespace tessera {
namespace {

using dtensor::Interpolation;
using interop::Case;
using interop::json;
using interop::require;
using interop::require_close;
using interop::require_equal;
using testing::cross;
using testing::part_of;
using testing::Sizes;

Placements placements_of(const json& list) {
  Placements placements;
  for (const json& item : list) {
    const auto kind = item[0].get<std::string>();
    if (kind == "R") placements.push_back(Placement::replicate());
    if (kind == "S") placements.push_back(Placement::shard(item[1].get<std::int64_t>()));
    if (kind == "_S")
      placements.push_back(Placement::strided_shard(item[1].get<std::int64_t>(), item[2].get<std::int64_t>()));
    if (kind == "P") placements.push_back(Placement::partial(item[1] == "max" ? ReduceOp::max : ReduceOp::sum));
  }
  return placements;
}

Placements placements_of(const Case& test, const std::string& key) { return placements_of(test.content().at(key)); }

bool is_partial(const Placements& placements) {
  return std::any_of(placements.begin(), placements.end(), [](const Placement& p) { return p.is_partial(); });
}

// What was of one rank there.
at::Tensor of_rank(const Case& test, const std::string& key, const ProcessGroup& group) {
  return test.tensors(key)[static_cast<std::size_t>(group.rank())];
}

void redistribute(const Case& test, const DeviceMesh& mesh) {
  const ProcessGroup& group = mesh.group();
  const Placements source = placements_of(test, "source"), target = placements_of(test, "target");
  const at::Tensor leaf = of_rank(test, "input", group).clone().requires_grad_();
  const DTensor before = DTensor::from_local(leaf, mesh, source, {test.get<Sizes>("size")});
  const DTensor after = before.redistribute(target);
  const at::Tensor local = after.to_local();
  if (is_partial(target)) {  // whose parts may be others
    const Placements full(target.size());
    require_equal(after.redistribute(full).to_local().detach(),
                  DTensor::from_local(of_rank(test, "expected", group), mesh, target, {after.size()})
                      .redistribute(full)
                      .to_local(),
                  "the full tensor");
  } else {
    require_equal(local.detach(), of_rank(test, "expected", group), "local tensor");
  }
  if (!test.has("gradient")) return;
  (local * of_rank(test, "weight", group)).sum().backward();
  require_equal(leaf.grad(), of_rank(test, "gradient", group), "gradient");
}

void chunks(const Case& test, const DeviceMesh& mesh) {
  const MeshLayout layout(test.get<Sizes>("size"), mesh.shape(), placements_of(test, "source"));
  const json expected = test.content().at("expected")[static_cast<std::size_t>(mesh.group().rank())];
  const LocalShape local = layout.local_shape(*mesh.coordinate());
  require(expected.size() == 1, "{} chunks", expected.size());
  require(expected[0][1].get<Sizes>() == local.sizes, "sizes {}", shape_to_string(local.sizes));
  const bool is_empty = volume(Box::full(local.sizes)) == 0;  // whose offsets PyTorch 2.6 has otherwise
  require(is_empty || expected[0][0].get<Sizes>() == local.offsets, "offsets {}", shape_to_string(local.offsets));
  const std::vector<LocalBox> boxes = layout.local_boxes(*mesh.coordinate());
  require(boxes.size() == (is_empty ? 0u : 1u), "{} boxes", boxes.size());
  if (!is_empty) require(boxes[0].box == Box(local.offsets, local.sizes), "box {}", to_string(boxes[0].box));
}

DTensor result_of(const std::string& name, const std::vector<DTensor>& inputs) {
  if (name == "linear") return dtensor::linear(inputs[0], inputs[1], inputs[2]);
  if (name == "matmul") return dtensor::matmul(inputs[0], inputs[1]);
  if (name == "add") return inputs[0] + inputs[1];
  if (name == "mul") return inputs[0] * inputs[1];
  if (name == "relu") return dtensor::relu(inputs[0]);
  if (name == "softmax") return dtensor::softmax(inputs[0], -1);
  if (name == "layer_norm") return dtensor::layer_norm(inputs[0], {4}, inputs[1], inputs[2]);
  if (name == "sum") return dtensor::sum(inputs[0], {0});
  if (name == "mean") return dtensor::mean(inputs[0]);
  if (name == "sub_scalar") return (inputs[0] - 2) * 3 / 7;
  if (name == "clamp") return dtensor::clamp(inputs[0], -3.5, 4.5);
  if (name == "where") return dtensor::where(dtensor::gt(inputs[0], inputs[1]), inputs[0], inputs[1]);
  if (name == "addmm") return dtensor::addmm(inputs[0], inputs[1], inputs[2], 0.5, 2);
  if (name == "bmm") return dtensor::matmul(inputs[0], inputs[1]);
  if (name == "log_softmax") return dtensor::log_softmax(inputs[0], -1);
  if (name == "var") return dtensor::var(inputs[0], {0});
  if (name == "norm") return dtensor::vector_norm(inputs[0], 2, {1});
  if (name == "cumsum") return dtensor::cumsum(inputs[0], 0);
  if (name == "view") return dtensor::reshape(inputs[0], {4, 3, 4});
  if (name == "flatten") return dtensor::flatten(inputs[0]);
  if (name == "permute") return dtensor::permute(inputs[0], {2, 0, 1});
  if (name == "unsqueeze") return dtensor::unsqueeze(inputs[0], 1);
  if (name == "cat") return dtensor::cat({inputs[0], inputs[1]});
  if (name == "stack") return dtensor::stack({inputs[0], inputs[1]}, 1);
  if (name == "split") {
    const std::vector<DTensor> parts = dtensor::split(inputs[0], Sizes{2, 4});
    return dtensor::cat({parts[1], parts[0]});
  }
  if (name == "slice") return dtensor::slice(inputs[0], 0, 1, 5, 2);
  if (name == "select") return dtensor::select(inputs[0], 0, -2);
  if (name == "frexp") return dtensor::frexp(inputs[0]).mantissa;
  if (name == "group_norm") return dtensor::group_norm(inputs[0], 2, inputs[1], inputs[2]);
  if (name == "batch_norm") return dtensor::batch_norm(inputs[0], inputs[1], inputs[2], {.training = true});
  if (name == "grid_sample") return dtensor::grid_sampler(inputs[0], inputs[1] / 8);
  if (name == "nearest_exact") return dtensor::interpolate(inputs[0], {7}, Interpolation::nearest_exact);
  if (name == "antialias") return dtensor::interpolate(inputs[0], {3, 3}, Interpolation::bicubic, false, true);
  if (name == "max_unpool") {
    const auto [values, indices] = dtensor::max_pool_with_indices(inputs[0], {.kernel = {2}});
    return dtensor::max_unpool(values, indices, {6, 4});
  }
  if (name == "householder") return dtensor::linalg_householder_product(inputs[0], inputs[1]);
  const auto on_mesh = [&](const at::Tensor& full) { return DTensor::from_local(full, inputs[0].device_mesh()); };
  // These tensors are in make_dtensor_values.py too.
  const at::Tensor rising = at::arange(24, at::kDouble).view({6, 4}) * 1e-3;
  const at::Tensor rows = at::tensor({3, 0, 1, 1, 2, 0}, at::kLong);
  const at::Tensor targets = at::tensor({3, 0, -100, 1, 2, 0}, at::kLong);
  const at::Tensor diagonal = at::eye(4, at::kDouble) * 20;
  if (name == "lu") {
    const auto factors = dtensor::linalg_lu(inputs[0] + diagonal);
    return factors.l + factors.u;
  }
  if (name == "cholesky_inverse") return dtensor::cholesky_inverse(inputs[0] + diagonal);
  if (name == "topk") return dtensor::topk(inputs[0] + on_mesh(rising), 2, 0).values;
  if (name == "gather") return dtensor::gather(inputs[0], 1, on_mesh(rows.view({6, 1})));
  if (name == "index_select") return dtensor::index_select(inputs[0], 1, on_mesh(rows));
  if (name == "cross_entropy") return dtensor::cross_entropy(inputs[0], on_mesh(targets));
  dtensor::LossOptions smooth;
  smooth.label_smoothing = 0.1;
  if (name == "smooth") return dtensor::cross_entropy(inputs[0], on_mesh(targets), smooth);
  fail(ErrorCode::unsupported, "no op {}", name);
}

void op(const Case& test, const DeviceMesh& mesh) {
  std::vector<DTensor> inputs;
  for (std::size_t i = 0; i < test.content().at("inputs").size(); ++i) {
    const std::vector<at::Tensor> locals = test.to_tensors(test.content().at("inputs")[i]);
    const at::Tensor leaf = locals[static_cast<std::size_t>(mesh.group().rank())].clone().requires_grad_();
    inputs.push_back(DTensor::from_local(leaf, mesh, placements_of(test.content().at("placements")[i]),
                                         {test.content().at("sizes")[i].get<Sizes>()}));
  }
  const at::Tensor found = result_of(test.get<std::string>("name"), inputs).full_tensor();
  require_close(found.detach(), test.tensor("expected"), "result");
  (found * test.tensor("weight")).sum().backward();
  const std::vector<at::Tensor> gradients = test.tensors("gradients");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    require_close(inputs[i].grad()->full_tensor(), gradients[i], fmt::format("gradient of input {}", i));
  }
}

void load_under_all(const Case& test, const DeviceMesh& mesh) {
  const Placements choices = {Placement::replicate(), Placement::shard(0), Placement::shard(1)};
  for (const Placements& placements : cross(choices, mesh.shape().size())) {
    StateDict state;
    std::map<std::string, DTensor> tensors;
    for (const auto& [name, described] : test.content().at("tensors").items()) {
      const at::Tensor full = test.to_tensor(described[1]);
      const MeshLayout layout(full.sizes().vec(), mesh.shape(), placements);
      const at::Tensor local = at::zeros(layout.local_shape(*mesh.coordinate()).sizes, full.options());
      state[name] = tensors.emplace(name, DTensor(mesh, layout, local)).first->second;
    }
    load(state, test.file() + ".checkpoint", mesh.group());
    for (const auto& [name, tensor] : tensors) {
      const at::Tensor full = test.to_tensor(test.content().at("tensors").at(name)[1]);
      require_equal(tensor.to_local(), part_of(full, tensor.layout(), *mesh.coordinate()),
                    fmt::format("{} as {}", name, to_string(placements)));
    }
  }
}

// As PyTorch had them, on the same mesh.
void resave(const Case& test, const DeviceMesh& mesh) {
  StateDict state;
  for (const auto& [name, described] : test.content().at("tensors").items()) {
    const at::Tensor full = test.to_tensor(described[1]);
    const MeshLayout layout(full.sizes().vec(), mesh.shape(), placements_of(described[0]));
    state[name] = DTensor(mesh, layout, part_of(full, layout, *mesh.coordinate()));
  }
  save(state, test.file() + ".resaved", mesh.group());
}

void checkpoint(const Case& test, const DeviceMesh& mesh) {
  load_under_all(test, mesh);
  resave(test, mesh);
}

int ranks_of(const Case& test) { return static_cast<int>(mesh_size(test.get<Sizes>("mesh"))); }

std::function<void(const Case& test)> checker(const ProcessGroup& group) {
  static const std::map<std::string, void (*)(const Case& test, const DeviceMesh& mesh)> checks = {
      {"redistribute", redistribute},
      {"chunks", chunks},
      {"op", op},
      {"checkpoint", checkpoint},
      {"load", load_under_all}};
  return [group, mesh = std::optional<DeviceMesh>()](const Case& test) mutable {
    const auto found = checks.find(test.get<std::string>("op"));
    require(found != checks.end(), "no such case");
    const auto shape = test.get<Sizes>("mesh");
    if (!mesh || mesh->shape() != shape) mesh.emplace(group, shape);
    found->second(test, *mesh);
  };
}

std::string row_of(const Case& test) { return "dtensor " + test.get<std::string>("op"); }

std::string name_of(const Case& test) {
  std::string name = "on mesh " + shape_to_string(test.get<Sizes>("mesh"));
  for (const char* key : {"name", "source", "target", "placements"}) {
    if (test.has(key)) name += " " + test.content().at(key).dump();
  }
  return name;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::interop::answer_all(argc, argv,
                                      {tessera::ranks_of, tessera::checker, tessera::row_of, tessera::name_of});
}
