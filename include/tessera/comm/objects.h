#pragma once
/// \file
/// Collectives on LibTorch's values of any type (`c10::IValue`): numbers, strings, lists, dicts, tensors. They travel
/// as pickles that LibTorch writes and reads, so all ranks must trust each other.

#include <ATen/core/ivalue.h>

#include <vector>

#include "tessera/comm/process_group.h"

namespace tessera {

std::vector<c10::IValue> all_gather_object(const ProcessGroup& group, const c10::IValue& value);
/// Empty but on `root`.
std::vector<c10::IValue> gather_object(const ProcessGroup& group, const c10::IValue& value, int root);
/// Root's; what others bring is not looked at.
c10::IValue broadcast_object(const ProcessGroup& group, const c10::IValue& value, int root);
/// Part r of root's goes to rank r.
c10::IValue scatter_object(const ProcessGroup& group, const std::vector<c10::IValue>& values, int root);

}  // namespace tessera
