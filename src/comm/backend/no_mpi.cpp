#include "comm/backend/backend.h"

namespace tessera::comm {

const MakeBackend make_mpi = nullptr;

}  // namespace tessera::comm
