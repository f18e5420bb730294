#include "input_checkpoint.h"

#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/crc32.h"
#include "tessera/base/file.h"
#include "tessera/format/zip.h"

namespace tessera::fuzz {
namespace {

namespace fs = std::filesystem;

Bytes archive_of(ByteView pickle) {
  const Bytes data(kDataBytes, 1);
  zip::Layout layout;
  const std::vector<std::pair<std::string, ByteView>> entries = {
      {"archive/data.pkl", pickle}, {"archive/data/0", ByteView(data)}, {"archive/version", as_bytes("3\n")}};
  for (const auto& [name, bytes] : entries) layout.add(name, bytes.size());
  Bytes archive;
  std::vector<std::uint32_t> crcs;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const ByteView bytes = entries[i].second;
    crcs.push_back(crc32(bytes));
    for (const Bytes& part : {layout.header(i), Bytes(bytes.begin(), bytes.end()), layout.descriptor(i, crcs[i])}) {
      archive.insert(archive.end(), part.begin(), part.end());
    }
  }
  const Bytes directory = layout.directory(crcs);
  archive.insert(archive.end(), directory.begin(), directory.end());
  return archive;
}

// An object, 1, as it is saved in a DCP data file; its archive is the first 4,715 bytes.
Bytes archived_one() {
  Bytes bytes = archive_of(as_bytes("\x80\x02K\x01."));
  bytes.resize(2 * kDataBytes);
  return bytes;
}

// {"a": a tensor of float32, [5, 2]}
constexpr std::string_view kTensorPickle(
    "\x80\x02}X\x01\0\0\0actorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
    "X\x01\0\0\0000X\x03\0\0\0cpuM\0\x04tQK\0K\x05K\x02\x86K\x02K\x01\x86\x89}tRs.",
    113);

}  // namespace

fs::path written(const Folder& folder, std::uint8_t kind, ByteView input) {
  switch (kind % 5) {
    case 0:
      fs::create_directory(folder / "in");
      write_new_file(folder / "in/.metadata", input);
      write_new_file(folder / "in/__0_0.distcp", archived_one());
      return folder / "in";
    case 1:
      write_new_file(folder / "in.pt", archive_of(input));
      return folder / "in.pt";
    case 2:
      write_new_file(folder / "in.safetensors", input);
      return folder / "in.safetensors";
    case 3:
      fs::create_directory(folder / "in");
      write_new_file(folder / "in/metadata.pkl", input);
      write_new_file(folder / "in/model_0.pt", archive_of(as_bytes(kTensorPickle)));
      return folder / "in";
    default:
      fs::create_directory(folder / "in");
      write_new_file(folder / "in/model_0.pt", archive_of(input));
      return folder / "in";
  }
}

}  // namespace tessera::fuzz
