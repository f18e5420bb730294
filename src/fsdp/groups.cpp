#include "fsdp/groups.h"

#include <algorithm>

#include "tessera/base/function_ref.h"
#include "tessera/state/internal/parameter_parts.h"

namespace tessera::fsdp {

namespace {

// Calls `in_group` for each group, also after it has thrown; then it gets the exception.
void in_each(std::span<const ProcessGroup> groups, std::exception_ptr failure,
             FunctionRef<void(const ProcessGroup&, const std::exception_ptr&)> in_group) {
  for (const ProcessGroup& group : groups) {
    try {
      in_group(group, failure);
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

std::vector<ProcessGroup> mesh_groups(const torch::nn::Module* module) {
  std::vector<ProcessGroup> groups;
  if (module == nullptr) return groups;
  const ParameterParts parts(*module);
  if (parts.empty()) return groups;
  for (const at::Tensor& param : module->parameters()) {
    const DTensorSpec* spec = param.defined() ? parts.find(param) : nullptr;
    if (spec == nullptr || !spec->mesh.has_this_rank()) continue;
    for (std::int64_t dim = 0; dim < spec->mesh.ndim(); ++dim) {
      const ProcessGroup& group = spec->mesh.group(dim);
      if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
    }
  }
  return groups;
}

std::vector<std::vector<std::string>> all_gather_texts(const ProcessGroup& group, std::span<const std::string> texts) {
  std::string mine;  // each followed by a NUL
  for (const std::string& text : texts) mine.append(text).push_back('\0');
  std::vector<std::vector<std::string>> all;
  for (const Bytes& bytes : group.all_gather_bytes(as_bytes(mine))) {
    std::vector<std::string>& of_rank = all.emplace_back();
    for (std::string_view rest = as_text(bytes); !rest.empty(); rest.remove_prefix(of_rank.back().size() + 1)) {
      of_rank.emplace_back(rest.substr(0, rest.find('\0')));
    }
  }
  return all;
}

void check_call(std::span<const ProcessGroup> groups, std::string_view operation,
                FunctionRef<void(CallArguments&)> check,
                FunctionRef<void(const ProcessGroup& group, CallArguments&)> describe) {
  CallArguments arguments;
  std::exception_ptr failure;
  try {
    check(arguments);
  } catch (...) {
    failure = std::current_exception();
  }
  in_each(groups, failure, [&](const ProcessGroup& group, const std::exception_ptr& known) {
    group.check_call(operation, [&](CallArguments& of_group) {
      if (known) std::rethrow_exception(known);
      of_group = arguments;
      if (describe) describe(group, of_group);
    });
  });
}

void agree(std::span<const ProcessGroup> groups, std::string_view step, std::exception_ptr failure) {
  in_each(groups, std::move(failure),
          [&](const ProcessGroup& group, const std::exception_ptr& known) { group.agree(step, known); });
}

}  // namespace tessera::fsdp
