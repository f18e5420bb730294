#pragma once
// Checks of arguments that each rank passes, before anything is sent.

#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/comm/process_group.h"

namespace tessera::ops {

// Checks that arguments are valid and agree between ranks. If `check`, which validates this rank's arguments, throws on
// any rank, every rank throws its error. If `arguments`, the results of describe(), differ between ranks, every rank
// throws Error(invalid_argument) naming two that differ. A collective.
void agree_on_arguments(std::string_view op, const ProcessGroup& group, const std::vector<std::string>& arguments,
                        FunctionRef<void()> check);

}  // namespace tessera::ops
