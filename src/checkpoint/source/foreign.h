#pragma once
// Recognises what is no checkpoint of a supported format, so that it is refused as what it is.

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/file.h"

namespace tessera::checkpoint {

// How many of a file's first bytes foreign_file() looks at, if it has as many.
inline constexpr std::size_t kForeignBytes = 512;

struct Foreign {
  std::string_view what;    // "a tar archive"
  std::string_view advice;  // what to do: "unpack it first"
};

// Returns what a file is by its bytes; nothing if they are not known. `first` has its first bytes.
std::optional<Foreign> foreign_file(ByteView first, const ByteSource& file);

// The same for a directory, by the names of what is in it.
std::optional<Foreign> foreign_directory(const std::filesystem::path& directory);

// Throws Error(unsupported).
[[noreturn]] void refuse_foreign(const std::filesystem::path& path, const Foreign& found);

// Throws Error(invalid_argument), with what to do, if `path` is empty, a URL, or "-".
void refuse_no_path(const std::filesystem::path& path);

// Returns the status of what is at `path`, after symbolic links. Throws Error(not_found) if nothing is, or as
// refuse_no_path(), and Error(io) if that cannot be found out.
std::filesystem::file_status require_present(const std::filesystem::path& path);

}  // namespace tessera::checkpoint
