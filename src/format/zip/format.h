#pragma once
/// \file
/// The records of a zip archive: signatures, sizes in bytes, and the field values that torch.save writes.
/// Source: PKWARE APPNOTE.TXT 6.3, sections 4.3 to 4.5; caffe2/serialize/inline_container.cc.

#include <cstddef>
#include <cstdint>

#include "tessera/base/bytes.h"

namespace tessera::zip {

inline constexpr std::uint32_t kLocalSignature = 0x04034b50;
inline constexpr std::uint32_t kDescriptorSignature = 0x08074b50;
inline constexpr std::uint32_t kRecordSignature = 0x02014b50;  // of one entry in the directory
inline constexpr std::uint32_t kEnd64Signature = 0x06064b50;
inline constexpr std::uint32_t kLocatorSignature = 0x07064b50;
inline constexpr std::uint32_t kEndSignature = 0x06054b50;

inline constexpr std::size_t kLocalBytes = 30;
inline constexpr std::size_t kDescriptorBytes = 16;
inline constexpr std::size_t kDescriptor64Bytes = 24;
inline constexpr std::size_t kRecordBytes = 46;
inline constexpr std::size_t kEnd64Bytes = 56;
inline constexpr std::size_t kLocatorBytes = 20;
inline constexpr std::size_t kEndBytes = 22;
inline constexpr std::size_t kExtraHeadBytes = 4;  // id and length of one extra field

inline constexpr std::uint16_t kExtraZip64 = 0x0001;
inline constexpr std::uint16_t kExtraPadding = 0x4246;  // "FB"
inline constexpr std::uint8_t kPaddingByte = 'Z';

inline constexpr std::uint16_t kFlagDescriptor = 1u << 3;
inline constexpr std::uint16_t kFlagUtf8 = 1u << 11;

inline constexpr std::uint16_t kMax16 = 0xFFFF;
inline constexpr std::uint32_t kMax32 = 0xFFFFFFFF;

// The case of ASCII letters does not distinguish names.
inline char lower_case(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

inline constexpr std::uint16_t kTorchEndMadeBy = 0x031E;  // in the zip64 end record; 0 in the entries
inline constexpr std::uint16_t kZip64Version = 45;
inline constexpr std::uint64_t kAlignment = 64;

/// Reads little-endian fields in order from bytes that are known to be long enough.
class FieldReader {
 public:
  explicit FieldReader(ByteView bytes) : at_(bytes.data()) {}
  std::uint16_t u16() { return take<std::uint16_t>(); }
  std::uint32_t u32() { return take<std::uint32_t>(); }
  std::uint64_t u64() { return take<std::uint64_t>(); }

 private:
  template <typename T>
  T take() {
    const T value = load_little_endian<T>(at_);
    at_ += sizeof(T);
    return value;
  }
  const std::uint8_t* at_;
};

}  // namespace tessera::zip
