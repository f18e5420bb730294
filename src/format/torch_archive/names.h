#pragma once
/// \file
/// The names of the entries of a torch.save archive, below its top folder.

#include <string_view>

namespace tessera::torch_archive {

inline constexpr std::string_view kPickleName = "data.pkl";
inline constexpr std::string_view kByteOrderName = "byteorder";
inline constexpr std::string_view kVersionName = "version";
inline constexpr std::string_view kIdName = ".data/serialization_id";
inline constexpr std::string_view kFormatVersionName = ".format_version";  // PyTorch 2.7 and later
inline constexpr std::string_view kAlignmentName = ".storage_alignment";   // PyTorch 2.7 and later
inline constexpr std::string_view kTorchScriptName = "constants.pkl";
inline constexpr std::string_view kStorageFolder = "/data/";

}  // namespace tessera::torch_archive
