#pragma once
// The entries of a dict that only rank 0 has, on every rank.

#include "tessera/base/function_ref.h"
#include "tessera/comm/process_group.h"
#include "tessera/state/value.h"

namespace tessera {

// Calls `f` on every rank for each entry of rank 0's dict, which is sent one entry at a time to save memory, of a
// view without the rest of its storage. The dicts of other ranks are ignored. `f` must not throw on some ranks only. A
// collective. If rank 0 cannot send an entry, every rank throws the error of save_object.
void for_each_entry_of_rank0(const Dict& dict, const ProcessGroup& group,
                             FunctionRef<void(const Key& key, const Value& value)> f);

}  // namespace tessera
