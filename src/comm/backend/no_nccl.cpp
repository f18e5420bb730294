#include "comm/backend/backend.h"

namespace tessera::comm {

const MakeBackend make_nccl = nullptr;

}  // namespace tessera::comm
