#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string>
#include <system_error>

#include "cli/output_file.h"
#include "cli/session.h"
#include "tessera/base/bytes.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/mosaic.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

struct MosaicFlags {
  std::string path, output;
  bool force = false, all_warnings = false;
};

// Throws unless `output` does not exist or is a page of this command: no other file may be replaced.
void check_may_replace(const fs::path& output) {
  std::error_code error;
  const fs::file_status status = fs::status(output, error);
  if (status.type() == fs::file_type::not_found) return;
  if (fs::is_regular_file(status)) {
    const File file = File::open_read(output);
    Bytes begin(checkpoint::kMosaicBegin.size());
    if (file.size_bytes() >= begin.size()) {
      file.read_at(0, begin);
      if (as_text(begin) == checkpoint::kMosaicBegin) return;
    }
  }
  fail(ErrorCode::invalid_argument,
       "write {}: the file exists and was not written by 'tessera map', expected a new path or such a page; name "
       "another one, or pass --force",
       output.string());
}

ExitStatus map(const MosaicFlags& flags, Session& session) {
  const bool to_standard_output = flags.output == "-";
  if (!to_standard_output && !flags.force) check_may_replace(flags.output);
  const auto opened = session.open(flags.path, false, flags.all_warnings);
  const std::string page = checkpoint::mosaic_html(*opened);
  session.cancellation.check();
  if (to_standard_output) {
    session.out.write(page);
    return kYes;
  }
  OutputFile file(flags.output, true);
  file.write(as_bytes(page));
  file.commit();
  session.out.print("wrote {}: {} in {}\n", one_line(flags.output), counted(opened->tensors().size(), "tensor"),
                    format_bytes(page.size()));
  return kYes;
}

}  // namespace

Command map_command() {
  const auto flags = std::make_shared<MosaicFlags>();
  return {.name = "map",
          .summary = "Draw which rank and file holds which box of which tensor.",
          .details = "Writes one self-contained HTML page that needs no network.",
          .examples = {"tessera map step-1000 -o map.html"},
          .options = {checkpoint_argument("CKPT", flags->path),
                      {.name = "output",
                       .letter = 'o',
                       .value_name = "FILE",
                       .help = "Page to write; - for standard output",
                       .target = &flags->output,
                       .required = true,
                       .is_path = true},
                      {.name = "force",
                       .help = "Replace the file even if it is no page of tessera",
                       .target = &flags->force},
                      all_warnings_option(flags->all_warnings)},
          .run = [flags](Session& session) { return map(*flags, session); }};
}

}  // namespace tessera::cli
