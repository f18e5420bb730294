#pragma once
// Comparison and agreement of all ranks that have a part of a model. They may be in several groups.

#include <torch/nn/module.h>

#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/base/rank_errors.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"

namespace tessera::fsdp {

// Returns the groups along the dimensions of the meshes of a tensor parallel model; empty for another model, or null.
std::vector<ProcessGroup> mesh_groups(const torch::nn::Module* module);

// Returns the texts of each rank. No text may contain a NUL. A collective.
std::vector<std::vector<std::string>> all_gather_texts(const ProcessGroup& group, std::span<const std::string> texts);

// As ProcessGroup::check_call and agree, in each of `groups`, in this order. If `check` throws on a rank, or its
// arguments differ in a group, all ranks throw that such groups connect. `describe`, if any, adds arguments that must
// be equal in one group; it must not throw.
void check_call(std::span<const ProcessGroup> groups, std::string_view operation,
                FunctionRef<void(CallArguments&)> check,
                FunctionRef<void(const ProcessGroup& group, CallArguments&)> describe = nullptr);
void agree(std::span<const ProcessGroup> groups, std::string_view step, std::exception_ptr failure);
template <typename F>
auto agree_on(std::span<const ProcessGroup> groups, std::string_view step, F&& f) {
  return agree_on_outcome(std::forward<F>(f), [&](const std::exception_ptr& failure) { agree(groups, step, failure); });
}

}  // namespace tessera::fsdp
