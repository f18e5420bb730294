#pragma once
/// \file
/// The safetensors format: a JSON header followed by raw row-major little-endian tensors.
/// See docs/formats/safetensors.md. Source: github.com/huggingface/safetensors; sharded saves:
/// torch/distributed/checkpoint/hf_storage.py.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/base/file.h"

namespace tessera::safetensors {

/// Returns the type code, such as "F32" for float32, or nothing if safetensors has no such type. Law:
/// `dtype_of_type_code(*type_code(d)) == d` for every d with a code. F6_E2M3 and F6_E3M2, which safetensors has but
/// PyTorch does not, are not a DType.
std::optional<std::string_view> type_code(DType dtype);
std::optional<DType> dtype_of_type_code(std::string_view code);

struct Tensor {
  std::string name;
  DType dtype = DType::float32;
  std::vector<std::int64_t> shape;  ///< as in PyTorch: the last dimension of F4 counts bytes, in the file half-bytes
  std::uint64_t begin_bytes = 0, end_bytes = 0;  ///< [begin, end), relative to the data
  bool operator==(const Tensor&) const = default;
};

struct Header {
  std::vector<Tensor> tensors;                  ///< ordered by (begin_bytes, end_bytes), then as in the header
  std::map<std::string, std::string> metadata;  ///< `__metadata__`
  std::uint64_t data_offset_bytes = 0;          ///< offset of the data in the file: 8 + header length
};

inline constexpr std::string_view kMetadataKey = "__metadata__";
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // as the reference implementation

/// Returns whether a file of this size with these first bytes (8 or more) could be a safetensors file.
bool looks_like_safetensors(ByteView first_bytes, std::uint64_t file_bytes);

/// Reads and validates the header of a complete file. The header must fit in the file and the size limit. It must be
/// strict JSON that starts with '{', without duplicate keys. Dtypes must be known, the range of every tensor must have
/// numel * element size bytes, and the ranges must cover the data to the end of the file without holes or overlaps.
/// Ignores members of a tensor other than dtype, shape and data_offsets, as the reference implementation does. Throws
/// `Error(corrupt)` with the byte offset, or `Error(unsupported)` for an unknown dtype. Memory is proportional to the
/// header.
Header read_header(const ByteSource& file);

/// Returns the length, the header and its padding (spaces, to a multiple of 8) for these tensors. Throws
/// `Error(invalid_argument)` if their ranges are not contiguous from 0, or if a name is not UTF-8 or occurs twice.
/// Throws `Error(unsupported)` for a dtype without a type code.
Bytes write_header(const std::vector<Tensor>& tensors, const std::map<std::string, std::string>& metadata);

/// The contents of `model.safetensors.index.json`.
struct Index {
  std::map<std::string, std::string> weight_map;  ///< tensor name -> file name
  std::optional<std::uint64_t> total_size;
  std::map<std::string, std::string> metadata;  ///< the string members of "metadata", without total_size
};
inline constexpr std::string_view kIndexFileName = "model.safetensors.index.json";
/// Parses an index. Throws `Error(corrupt)` if a tensor is listed twice, or if a file is not a plain name in the folder
/// of the index. `name` is used in messages.
Index read_index(ByteView json, const std::string& name);
/// Returns the JSON that HuggingFace writes: indented by 2, with sorted keys and a final newline.
Bytes write_index(const Index& index);

/// Returns what PyTorch's HuggingFace writer stores in `__metadata__` when ranks save shards: for each tensor, the
/// offsets of this file's box, one for each dimension. Returns nothing if the header has no such metadata. Throws
/// `Error(corrupt)` for a tensor that is not in the header; a tensor of the header without offsets is left to the
/// caller. `name` is used in messages.
std::optional<std::map<std::string, std::vector<std::int64_t>>> dcp_saved_offsets(const Header& header,
                                                                                  const std::string& name);
/// Returns the `__metadata__` with these offsets: DCP_VERSION, DCP_SHARDING_INFO, format.
std::map<std::string, std::string> dcp_metadata(const std::map<std::string, std::vector<std::int64_t>>& saved_offsets);

/// Returns "model-00002-of-00005.safetensors" for index 1 of 5, and "model.safetensors" if `count` is 1.
std::string shard_file_name(std::size_t index, std::size_t count);
/// Returns "shard-00003-model-00002-of-00005.safetensors" for index 1 of the 5 files of rank 2, the name that PyTorch's
/// HuggingFace writer gives to files saved by ranks.
std::string rank_shard_file_name(std::size_t rank, std::size_t index, std::size_t count);

}  // namespace tessera::safetensors
