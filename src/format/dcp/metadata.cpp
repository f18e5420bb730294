#include "tessera/format/dcp_metadata.h"

#include <algorithm>

namespace tessera::dcp {

namespace {

bool equal_items(const Metadata& a, const StoredItem& x, const Metadata& b, const StoredItem& y) {
  if (x.file == StoredItem::kNoFile || y.file == StoredItem::kNoFile) return x.file == y.file;
  return a.files[x.file] == b.files[y.file] && a.transforms[x.transforms] == b.transforms[y.transforms] &&
         x.offset_bytes == y.offset_bytes && x.length_bytes == y.length_bytes;
}

bool equal_entries(const Metadata& a, const MetadataEntry& x, const Metadata& b, const MetadataEntry& y) {
  return x.name == y.name && x.is_tensor == y.is_tensor && x.properties == y.properties && x.shape == y.shape &&
         ((x.chunks.empty() && y.chunks.empty()) || x.chunks == y.chunks) &&
         std::equal(x.items.begin(), x.items.end(), y.items.begin(), y.items.end(),
                    [&](const StoredItem& i, const StoredItem& j) { return equal_items(a, i, b, j); });
}

bool equal_fields(const std::vector<ExtraField>& a, const std::vector<ExtraField>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const ExtraField& x, const ExtraField& y) {
    return x.name == y.name && pickle::equal(x.value, y.value);
  });
}

bool equal_dialects(const Metadata& a, const Metadata& b) {
  const auto is_tensor = [](const MetadataEntry& entry) { return entry.is_tensor; };
  const auto what_shows = [&](const Metadata& m) {
    const bool shows = m.dialect != Dialect::torch_2_0 || std::any_of(m.entries.begin(), m.entries.end(), is_tensor);
    return shows ? m.dialect : Dialect::torch_2;
  };
  return what_shows(a) == what_shows(b);
}

}  // namespace

const MetadataEntry* Metadata::find(std::string_view name) const {
  const auto found =
      std::find_if(entries.begin(), entries.end(), [&](const MetadataEntry& entry) { return entry.name == name; });
  return found == entries.end() ? nullptr : &*found;
}

bool equal(const Metadata& a, const Metadata& b) {
  return equal_dialects(a, b) && a.version == b.version && a.storage_meta == b.storage_meta && a.paths == b.paths &&
         a.unclaimed_paths == b.unclaimed_paths && equal_fields(a.extra, b.extra) &&
         equal_fields(a.storage_meta_extra, b.storage_meta_extra) &&
         std::equal(a.entries.begin(), a.entries.end(), b.entries.begin(), b.entries.end(),
                    [&](const MetadataEntry& x, const MetadataEntry& y) { return equal_entries(a, x, b, y); }) &&
         std::equal(a.unclaimed.begin(), a.unclaimed.end(), b.unclaimed.begin(), b.unclaimed.end(),
                    [&](const UnclaimedItem& x, const UnclaimedItem& y) {
                      return x.name == y.name && x.offsets == y.offsets && equal_items(a, x.item, b, y.item);
                    });
}

}  // namespace tessera::dcp
