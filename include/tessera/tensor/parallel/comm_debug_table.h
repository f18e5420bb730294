#pragma once
/// \file
/// A table of what each module of a model communicates, in forward and in backward, and how its parameters are sharded.
///
///     CommDebugTable table(group);
///     struct MlpImpl : torch::nn::Module {
///       at::Tensor forward(const at::Tensor& x) {
///         const auto h = table.call("net1", *net1, x, [&](const at::Tensor& y) { return at::relu(net1(y)); });
///         return table.call("net2", *net2, h, [&](const at::Tensor& y) { return net2(y); });
///       }
///     };
///     table.call("MLP", *mlp, x, [&](const at::Tensor& y) { return mlp(y); }).sum().backward();
///     std::cout << table;
///     // MLP; forward all_reduce 1; backward all_reduce 1
///     //   net1: weight [S(0)], bias [S(0)]; backward all_reduce 1
///     //   net2: weight [S(1)], bias [R]; forward all_reduce 1
///
/// A LibTorch module has no hooks, so the program states which calls are rows. Calls may be nested; counts of a call
/// include those of the calls in it. PyTorch: get_comm_counts, get_sharding_info and generate_comm_debug_tracing_table
/// of CommDebugMode in torch/distributed/tensor/debug, which also lists operations.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/comm/process_group.h"
#include "tessera/layout/placement.h"

namespace tessera {

/// Returns the placements of the parameters in `module` that are local tensors of DTensors, by name ("net1.weight").
/// Plain tensors are left out. PyTorch: get_sharding_info.
std::map<std::string, Placements> sharding_info(const torch::nn::Module& module);

class CommDebugTable {
 public:
  using Counts = std::map<std::string, std::int64_t>;  ///< as CommDebugMode::counts

  struct Row {
    std::string name, path;  ///< of the call; after those of the enclosing calls: "net1", "MLP.net1"
    std::size_t depth = 0;   ///< number of enclosing calls
    std::vector<std::pair<std::string, Placements>> shardings;  ///< of the module's own parameters that are sharded
    std::int64_t calls = 0;                                     ///< how often it was called
    Counts forward, backward;
  };

  /// Counts what this rank starts in all groups of the world of `group`.
  explicit CommDebugTable(const ProcessGroup& group);

  /// Returns f(x), and records the call as a row below that of the enclosing call. Calls with the same path share a
  /// row. Backward is counted from the gradient of the result to that of `x`, if x requires one. Communicates nothing
  /// itself.
  at::Tensor call(const std::string& name, const torch::nn::Module& module, const at::Tensor& x,
                  FunctionRef<at::Tensor(const at::Tensor&)> f) const;

  /// Returns the rows in the order of their first calls.
  std::vector<Row> rows() const;
  /// Returns a line for each row, indented by its depth.
  std::string to_string() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

std::ostream& operator<<(std::ostream& out, const CommDebugTable& table);

}  // namespace tessera
