#pragma once
/// \file
/// Collectives on LibTorch values of any type (`c10::IValue`): numbers, strings, lists, dicts, tensors. Values are sent
/// as pickles that LibTorch writes and reads, so all ranks must trust each other. All functions are collectives of
/// `group`; errors are those of its collectives, here also for a `root` that is not a rank of the group, and for a
/// value that LibTorch cannot pickle. A rank that cannot read what it received throws alone.

#include <ATen/core/ivalue.h>

#include <vector>

#include "tessera/comm/process_group.h"

namespace tessera {

/// Returns the values of all ranks, by rank.
std::vector<c10::IValue> all_gather_object(const ProcessGroup& group, const c10::IValue& value);
/// Returns the ranks' values on `root`, and an empty list on other ranks.
std::vector<c10::IValue> gather_object(const ProcessGroup& group, const c10::IValue& value, int root);
/// Returns the value of `root`. Other ranks' values are ignored.
c10::IValue broadcast_object(const ProcessGroup& group, const c10::IValue& value, int root);
/// Sends values[r] of `root` to rank r. Other ranks' values are ignored.
c10::IValue scatter_object(const ProcessGroup& group, const std::vector<c10::IValue>& values, int root);

}  // namespace tessera
