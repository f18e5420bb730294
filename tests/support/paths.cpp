#include "support/paths.h"

namespace tessera::testing {

std::string source_dir() { return TESSERA_SOURCE_DIR; }
std::string command_path() { return TESSERA_COMMAND; }
std::string programs_dir() { return TESSERA_PROGRAMS; }

}  // namespace tessera::testing
