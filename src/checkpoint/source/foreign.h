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

// Returns what a file is, and what to do with it, by its bytes; nothing if they are not known. `first` has its first
// bytes.
std::optional<std::string_view> foreign_file(ByteView first, const ByteSource& file);

// The same for a directory, by the names of what is in it.
std::optional<std::string_view> foreign_directory(const std::filesystem::path& directory);

// Throws Error(invalid_argument), with what to do, if `path` is a URL, or "-".
void refuse_no_path(const std::filesystem::path& path);

// Throws the same, or else Error(not_found). `path` does not exist.
[[noreturn]] void refuse_missing(const std::filesystem::path& path);

}  // namespace tessera::checkpoint
