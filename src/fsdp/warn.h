#pragma once
// Warnings, by LibTorch's mechanism: `c10::Warning::set_warning_handler` (2.x: `c10::WarningUtils`) redirects them.

#include <string>

namespace tessera::fsdp {

// Emits a warning, unless this process has emitted one with the same text.
void warn_once(const std::string& text);

// Returns whether TORCH_DISTRIBUTED_DEBUG asks for messages: INFO or DETAIL.
bool explains_itself();

}  // namespace tessera::fsdp
