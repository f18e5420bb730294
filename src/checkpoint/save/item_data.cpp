// Reads the elements of an item from strided memory.

#include <cstring>
#include <utility>

#include "checkpoint/save/format.h"
#include "tessera/layout/byte_ranges.h"
#include "tessera/layout/flat_interval.h"

namespace tessera::checkpoint {
namespace {

// Returns the elements in `memory` as row-major data. `dtype_bytes` is the size of an element.
Data memory_data(HostMemory memory, std::vector<std::int64_t> sizes, std::int64_t dtype_bytes) {
  Data data;
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  data.length_bytes = static_cast<std::uint64_t>(count * dtype_bytes);
  data.granule_bytes = static_cast<std::uint64_t>(dtype_bytes);
  if (memory.read) {
    data.produce = [memory = std::move(memory)](std::uint64_t begin_bytes, MutableByteView out) {
      memory.read(begin_bytes, out);
    };
    return data;
  }
  const std::vector<std::int64_t> row_major = row_major_strides(sizes);
  bool is_row_major = true;
  for (std::size_t d = 0; d < memory.strides.size(); ++d) {
    is_row_major = is_row_major && (sizes[d] == 1 || memory.strides[d] == row_major[d]);
  }
  if (is_row_major || count == 0) {
    data.produce = [memory = std::move(memory)](std::uint64_t begin_bytes, MutableByteView out) {
      if (!out.empty()) std::memcpy(out.data(), memory.data + begin_bytes, out.size());
    };
    return data;
  }
  data.produce = [memory = std::move(memory), sizes = std::move(sizes), dtype_bytes](std::uint64_t begin_bytes,
                                                                                     MutableByteView out) {
    const std::int64_t begin = static_cast<std::int64_t>(begin_bytes) / dtype_bytes;
    const std::int64_t end = begin + static_cast<std::int64_t>(out.size()) / dtype_bytes;
    std::uint8_t* to = out.data();
    for (const Box& box : boxes_of_flat_interval(sizes, begin, end)) {
      const std::uint8_t* from = memory.data;
      for (std::size_t d = 0; d < sizes.size(); ++d) from += box.offsets[d] * memory.strides[d] * dtype_bytes;
      copy_strided(box.sizes, dtype_bytes, from, memory.strides, to, row_major_strides(box.sizes));
      to += volume(box) * dtype_bytes;
    }
  };
  return data;
}

}  // namespace

Data item_data(const RankItems& items, std::uint32_t i) {
  const SavePlan::WriteItem item = items.plan[i];
  return memory_data(items.planner.resolve_tensor(items.state, items.plan, i),
                     {item.box.sizes.begin(), item.box.sizes.end()},
                     dtype_size(items.plan.entries()[item.entry].properties->dtype));
}

}  // namespace tessera::checkpoint
