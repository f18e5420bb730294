#pragma once
/// \file
/// Safetensors: a JSON header and raw row-major little-endian tensors. See docs/formats/safetensors.md.
/// Source: github.com/huggingface/safetensors; sharded saves: torch/distributed/checkpoint/hf_storage.py.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/base/file.h"

namespace tessera::safetensors {

/// "F32" for float32, ...; nothing where safetensors has no such type. Law: `dtype_of_type_code(*type_code(d)) == d`
/// where there is one. F6_E2M3 and F6_E3M2, which safetensors has and PyTorch hasn't, are no DType.
std::optional<std::string_view> type_code(DType dtype);
std::optional<DType> dtype_of_type_code(std::string_view code);

struct Tensor {
  std::string name;
  DType dtype = DType::float32;
  std::vector<std::int64_t> shape;  ///< PyTorch's: of F4 the last dimension counts bytes, in the file halves of them
  std::uint64_t begin_bytes = 0, end_bytes = 0;  ///< relative to the data
  bool operator==(const Tensor&) const = default;
};

struct Header {
  std::vector<Tensor> tensors;                  ///< in order of (begin_bytes, end_bytes), then as in the header
  std::map<std::string, std::string> metadata;  ///< `__metadata__`
  std::uint64_t data_offset_bytes = 0;          ///< of the data, in the file: 8 + header length
};

inline constexpr std::string_view kMetadataKey = "__metadata__";
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // as the reference implementation

/// Whether the first bytes (8 or more) of a file of this size could begin a safetensors file.
bool looks_like_safetensors(ByteView first_bytes, std::uint64_t file_bytes);

/// Reads and validates the header of a whole file: length within the file and the cap, strict JSON that begins with
/// '{', no key twice, known dtypes, every tensor's range equal to numel * size, ranges from 0 to the end of the file
/// without holes or overlaps. Members of a tensor other than dtype, shape and data_offsets are passed over, as the
/// reference implementation does. `Error(corrupt)` with the byte offset; an unknown dtype is `Error(unsupported)`.
/// Memory in proportion to the header.
Header read_header(const ByteSource& file);

/// The bytes of length, header and padding (spaces, to a multiple of 8) for these tensors, whose ranges must follow one
/// another from 0 (`Error(invalid_argument)` otherwise, and for names that aren't UTF-8 or there twice). A dtype
/// without a type code is `Error(unsupported)`.
Bytes write_header(const std::vector<Tensor>& tensors, const std::map<std::string, std::string>& metadata);

/// `model.safetensors.index.json`.
struct Index {
  std::map<std::string, std::string> weight_map;  ///< tensor name -> file name
  std::optional<std::uint64_t> total_size;
  std::map<std::string, std::string> metadata;  ///< the string members of "metadata" but total_size
};
inline constexpr std::string_view kIndexFileName = "model.safetensors.index.json";
/// Parses an index. `Error(corrupt)` for a tensor that is listed twice and for a file that is not a plain name in the
/// index's own folder. `name` is for messages.
Index read_index(ByteView json, const std::string& name);
/// The JSON that HuggingFace writes: indented by 2, keys sorted, a line's end behind it.
Bytes write_index(const Index& index);

/// What PyTorch's HuggingFace writer says in `__metadata__` when ranks saved shards: tensor name -> offsets of this
/// file's box, as many as the tensor has dimensions. Nothing if the header says nothing of it. `Error(corrupt)` for a
/// tensor that isn't in the header; one that is and has no offsets is left to the caller. `name` is for messages.
std::optional<std::map<std::string, std::vector<std::int64_t>>> dcp_saved_offsets(const Header& header,
                                                                                  const std::string& name);
/// The `__metadata__` that says so: DCP_VERSION, DCP_SHARDING_INFO, format.
std::map<std::string, std::string> dcp_metadata(const std::map<std::string, std::vector<std::int64_t>>& saved_offsets);

/// "model-00002-of-00005.safetensors" for index 1 of 5; "model.safetensors" for one of one.
std::string shard_file_name(std::size_t index, std::size_t count);
/// "shard-00003-model-00002-of-00005.safetensors" for index 1 of the 5 files of rank 2, as PyTorch's HuggingFace writer
/// calls what ranks save.
std::string rank_shard_file_name(std::size_t rank, std::size_t index, std::size_t count);

}  // namespace tessera::safetensors
