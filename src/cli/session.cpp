#include "cli/session.h"

namespace tessera::cli {

std::shared_ptr<const checkpoint::Checkpoint> Session::open(const std::string& path, bool no_checksums,
                                                            bool all_warnings) {
  checkpoint::OpenOptions options;
  options.check_checksums = !no_checksums;
  auto opened = checkpoint::Checkpoint::open(path, options);
  print_warnings(opened->warnings(), all_warnings);
  return opened;
}

}  // namespace tessera::cli
