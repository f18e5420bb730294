#pragma once
// The names of the files that a save writes, and of the entries next to a checkpoint that are not visible yet, or no
// longer.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::checkpoint {

inline constexpr std::string_view kMetadataFileName = ".metadata";
// Suffix of a file that is about to be renamed to its final name.
inline constexpr std::string_view kTemporarySuffix = ".tmp";
// The sidecar before it is renamed. Only one save at a time can create it: that which is being committed.
inline constexpr std::string_view kTemporarySidecarName = ".tessera.json.tmp";

// The name of a DCP data file: "__<rank>_<number>.distcp", or "__<rank>_<number>.<generation>.distcp" for a save that
// replaces an older checkpoint. Each save uses a larger generation than any existing file, so that it never touches a
// file of a committed checkpoint or of another save.
struct DataFileName {
  std::int64_t rank = 0;
  std::int64_t number = 0;      // among the rank's files
  std::int64_t generation = 0;  // 0: not part of the name
  bool operator==(const DataFileName&) const = default;
};

// Law: parse_data_file_name(to_string(n)) == n.
std::string to_string(const DataFileName& name);
std::optional<DataFileName> parse_data_file_name(std::string_view text);

// The name that a save of a generation gives the file `name` until it is committed: "<name>.tmp", or
// "<name>.<generation>.tmp". Saves that overlap in time have different generations, so that none renames a file of
// another.
struct UncommittedName {
  std::string name;
  std::int64_t generation = 0;  // 0: not part of the file's name
  bool operator==(const UncommittedName&) const = default;
};

// Law: parse_uncommitted_name(to_string(n)) == n if `name` is `.metadata` or a safetensors shard of a rank. Returns
// nothing for other files.
std::string to_string(const UncommittedName& name);
std::optional<UncommittedName> parse_uncommitted_name(std::string_view text);

// Suffix of a safetensors file.
inline constexpr std::string_view kSafetensorsSuffix = ".safetensors";

// The rank in "__<rank>.metadata", which a rank writes when it saves without collectives.
std::optional<std::int64_t> parse_rank_metadata_name(std::string_view text);

// Whether an interrupted save may have left this file, provided that nothing refers to it.
bool may_be_left_by_a_save(std::string_view name);

// The name of an entry that process `process` made for, or of, the entry `name` of the same directory.
struct HiddenName {
  std::string name;
  std::int64_t process = 0;
  std::int64_t number = 0;  // among those of the process
  bool operator==(const HiddenName&) const = default;
};

// ".<name>.tessera-<process>-<number>.partial": a folder that is about to be renamed to `name`, or that holds the file
// that is. Locked while its process lives.
std::string staging_name(const HiddenName& name);
std::optional<HiddenName> parse_staging_name(std::string_view text);

// ".<name>.tessera-<process>-<number>.removed": what was called `name` and is being deleted.
std::string removed_name(const HiddenName& name);
std::optional<HiddenName> parse_removed_name(std::string_view text);

}  // namespace tessera::checkpoint
