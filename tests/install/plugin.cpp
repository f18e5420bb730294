// Links every torch-free module.

#include <string>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/version.h"

static_assert(TESSERA_VERSION_MAJOR >= 0 && TESSERA_VERSION_MINOR >= 0 && TESSERA_VERSION_PATCH >= 0);

// Opens a checkpoint and returns the name of the error's code.
std::string open_error(const char* path) {
  try {
    tessera::checkpoint::Checkpoint::open(path);
  } catch (const tessera::Error& error) {
    return std::string(tessera::error_code_name(error.code()));
  }
  return "none in tessera " TESSERA_VERSION;
}
