#pragma once
// What `tessera verify` and `tessera sum` print alike.

#include "cli/session.h"
#include "tessera/checkpoint/verify.h"

namespace tessera::cli {

void print_problems(Session& session, const checkpoint::VerifyReport& report);

}  // namespace tessera::cli
