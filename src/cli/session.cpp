#include "cli/session.h"

namespace tessera::cli {

std::shared_ptr<const checkpoint::Checkpoint> Session::open(const std::string& path, bool no_checksums) {
  checkpoint::OpenOptions options;
  options.check_checksums = !no_checksums;
  auto opened = checkpoint::Checkpoint::open(path, options);
  for (const std::string& warning : opened->warnings()) print_warning(warning);
  return opened;
}

}  // namespace tessera::cli
