#include "tessera/tensor/parallel/comm_debug_table.h"

#include <fmt/ranges.h>

#include <optional>
#include <ostream>

#include "tessera/base/function_ref.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/internal/linear.h"
#include "tessera/tensor/dtensor_parameters.h"

namespace tessera {

namespace {

using Shardings = std::vector<std::pair<std::string, Placements>>;

Shardings own_shardings(const torch::nn::Module& module) {
  Shardings found;
  const auto* sharded = dynamic_cast<const DTensorParameters*>(&module);
  if (sharded == nullptr) return found;
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    const DTensorSpec* spec = sharded->dtensor_spec(parameter.key());
    if (spec != nullptr) found.emplace_back(parameter.key(), spec->layout.placements());
  }
  return found;
}

std::string counts_text(const CommDebugTable::Counts& counts) {
  std::vector<std::string> texts;
  for (const auto& [name, count] : counts) texts.push_back(fmt::format("{} {}", name, count));
  return fmt::format("{}", fmt::join(texts, ", "));
}

}  // namespace

std::map<std::string, Placements> sharding_info(const torch::nn::Module& module) {
  std::map<std::string, Placements> info;
  for (const auto& child : module.named_modules("", /*include_self=*/true)) {
    const std::string prefix = child.key().empty() ? "" : child.key() + ".";
    for (auto& [name, placements] : own_shardings(*child.value())) info[prefix + name] = std::move(placements);
  }
  return info;
}

struct CommDebugTable::State {
  ProcessGroup group;
  std::vector<Row> rows;
  std::vector<std::size_t> running;  // calls, by their rows, from the outermost

  // Returns the row of a call that begins.
  std::size_t begin(const std::string& name, const torch::nn::Module& module) {
    std::string path = running.empty() ? name : rows[running.back()].path + "." + name;
    std::size_t row = 0;
    while (row < rows.size() && rows[row].path != path) ++row;
    if (row == rows.size()) {
      Row& made = rows.emplace_back();
      made.name = name;
      made.path = std::move(path);
      made.depth = running.size();
      made.shardings = own_shardings(module);
    }
    ++rows[row].calls;
    running.push_back(row);
    return row;
  }
};

namespace {

void add_counts(CommDebugTable::Counts& to, const CommDebugTable::Counts& counts) {
  for (const auto& [name, count] : counts) to[name] += count;
}

// Returns `tensor`, and calls `f` when its gradient arrives.
at::Tensor with_hook(const at::Tensor& tensor, std::function<void()> f) {
  return comm::linear(
      tensor, [](const at::Tensor& x) { return x.view_as(x); },
      [f = std::move(f)](const at::Tensor& gradient) {
        f();
        return gradient;
      });
}

}  // namespace

CommDebugTable::CommDebugTable(const ProcessGroup& group) : state_(std::make_shared<State>(State{group, {}, {}})) {}

at::Tensor CommDebugTable::call(const std::string& name, const torch::nn::Module& module, const at::Tensor& x,
                                FunctionRef<at::Tensor(const at::Tensor&)> f) const {
  struct Running {
    explicit Running(std::vector<std::size_t>& calls_in) : calls(calls_in) {}
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
    ~Running() { calls.pop_back(); }
    std::vector<std::size_t>& calls;
  };
  const std::shared_ptr<State> state = state_;
  const std::size_t row = state->begin(name, module);
  const Running running(state->running);
  const auto backward = std::make_shared<std::optional<CommDebugMode>>();
  const at::Tensor input = !x.requires_grad() ? x : with_hook(x, [state, row, backward] {
    if (*backward) add_counts(state->rows[row].backward, (*backward)->counts());
    backward->reset();
  });
  const CommDebugMode forward(state->group);
  at::Tensor result = f(input);
  add_counts(state->rows[row].forward, forward.counts());
  if (!x.requires_grad() || !result.requires_grad()) return result;
  return with_hook(result, [state, backward] { backward->emplace(state->group); });
}

std::vector<CommDebugTable::Row> CommDebugTable::rows() const { return state_->rows; }

std::string CommDebugTable::to_string() const {
  std::string text;
  for (const Row& row : state_->rows) {
    text += std::string(2 * row.depth, ' ') + row.name;
    std::vector<std::string> parts;
    for (const auto& [name, placements] : row.shardings) {
      parts.push_back(fmt::format("{} {}", name, tessera::to_string(placements)));
    }
    if (!parts.empty()) text += fmt::format(": {}", fmt::join(parts, ", "));
    if (!row.forward.empty()) text += "; forward " + counts_text(row.forward);
    if (!row.backward.empty()) text += "; backward " + counts_text(row.backward);
    text += '\n';
  }
  return text;
}

std::ostream& operator<<(std::ostream& out, const CommDebugTable& table) { return out << table.to_string(); }

}  // namespace tessera
