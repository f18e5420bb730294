#include "cli/session.h"

namespace tessera::cli {

std::shared_ptr<const checkpoint::Checkpoint> Session::open(const std::string& path) {
  auto opened = checkpoint::Checkpoint::open(path);
  for (const std::string& warning : opened->warnings()) print_warning(warning);
  return opened;
}

}  // namespace tessera::cli
