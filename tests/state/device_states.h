#pragma once
// States with tensors on a device, for tests of checkpoints.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>

#include "tessera/state/flatten.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"
#include "tessera/state/value.h"

namespace tessera::testing {

// Tensors of more than one block, and of every way in which elements can lie in memory.
inline StateDict state_on(at::Device device) {
  const auto values = [&](std::int64_t count) { return at::arange(count, at::kDouble).mul(0.37).sin(); };
  const at::Tensor shared = values(600).to(at::kFloat).to(device);
  StateDict state;
  state["large"] = values(3 << 20).to(at::kFloat).to(device);
  state["transposed"] = values(1500 * 1100).view({1500, 1100}).to(at::kFloat).to(device).t();
  state["half"] = values(70).to(at::kBFloat16).to(device);
  state["view"] = shared.narrow(0, 100, 300);
  state["same_view"] = shared.narrow(0, 100, 300);
  state["column"] = shared.view({20, 30}).select(1, 3);
  state["scalar"] = values(2)[1].to(device);
  state["empty"] = at::empty({0, 3}, at::TensorOptions().device(device));
  state["integers"] = at::arange(50).to(device);
  state["on_cpu"] = values(8);
  return state;
}

// The same values, without shared memory.
inline StateDict separate_state_on(at::Device device) {
  StateDict state = state_on(device);
  for (const char* name : {"view", "same_view"}) state[name] = state.at(name).get<at::Tensor>().clone();
  const at::Tensor column = state.at("column").get<at::Tensor>();
  state["column"] = at::empty({20, 30}, column.options()).select(1, 3).copy_(column);
  return state;
}

inline void change(const StateDict& state) {
  for (const auto& entry : state) entry.value.get<at::Tensor>().mul_(2);
}

inline void expect_equal(const StateDict& found, const StateDict& expected) {
  for (const auto& entry : expected) {
    EXPECT_TRUE(at::equal(found.at(entry.key).get<at::Tensor>().cpu(), entry.value.get<at::Tensor>().cpu()))
        << flat_name({entry.key});
  }
}

// Checks that a save has what the current stream of `device` computes before it, with little and with much memory.
inline void expect_saves_in_order(at::Device device, const std::filesystem::path& path) {
  const StateDict state = state_on(device), expected = state_on(at::kCPU);
  change(state);
  change(expected);
  for (const std::uint64_t limit : {std::uint64_t{1}, std::uint64_t{256} << 20}) {
    SaveOptions options;
    options.staging_bytes = limit;
    save(state, path, {}, options);
    expect_equal(load_full(path), expected);
  }
}

}  // namespace tessera::testing
