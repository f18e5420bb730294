#include "comm/rpc/agent.h"

namespace tessera::comm {

const MakeAgent make_tensorpipe_agent = nullptr;

}  // namespace tessera::comm
