#pragma once
// The names of a DCP checkpoint's files.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::checkpoint {

inline constexpr std::string_view kMetadataFileName = ".metadata";
// Of what is about to be renamed over the file without the suffix.
inline constexpr std::string_view kTemporarySuffix = ".tmp";

// "__<rank>_<number>.distcp", and "__<rank>_<number>.<generation>.distcp" for a save over an older checkpoint, whose
// files have a smaller generation: a save never touches a file that a committed checkpoint refers to.
struct DataFileName {
  std::int64_t rank = 0;
  std::int64_t number = 0;      // among the rank's files
  std::int64_t generation = 0;  // 0: no part of the name
  bool operator==(const DataFileName&) const = default;
};

// Law: parse_data_file_name(to_string(n)) == n.
std::string to_string(const DataFileName& name);
std::optional<DataFileName> parse_data_file_name(std::string_view text);

// Of what may be a file of a safetensors checkpoint, and what a save calls one until it is committed.
inline constexpr std::string_view kSafetensorsSuffix = ".safetensors";
std::string uncommitted_safetensors_name(std::string_view name);
// The name without what uncommitted_safetensors_name added.
std::optional<std::string> parse_uncommitted_safetensors_name(std::string_view text);

// The rank of "__<rank>.metadata", which a rank writes that saves without collectives.
std::optional<std::int64_t> parse_rank_metadata_name(std::string_view text);

// Whether a file may be what a save left that was interrupted, if nothing refers to it.
bool may_be_left_by_a_save(std::string_view name);

}  // namespace tessera::checkpoint
