#pragma once
// States whose elements are their positions in their tensors, in many layouts over ranks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "support/element_oracle.h"
#include "support/thread_ranks.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/flat_state.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/load_plan.h"
#include "tessera/checkpoint/save.h"
#include "tessera/format/pickle_writer.h"
#include "tessera/format/python_value.h"
#include "tessera/format/torch_archive.h"
#include "tessera/layout/byte_ranges.h"
#include "tessera/layout/sharding.h"

namespace tessera::checkpoint::saved {

using Shape = std::vector<std::int64_t>;

// Returns the boxes of a tensor that a rank has.
using Layout = std::function<std::vector<Box>(const Shape& shape, int rank, int ranks)>;

struct NamedLayout {
  const char* name;
  Layout boxes;
};

// Cells of a grid with cells of size 2 in each dimension, assigned to ranks in turn.
inline std::vector<Box> grid_cells(const Shape& shape, int rank, int ranks) {
  std::vector<Box> cells = {Box::full(shape)};
  for (std::size_t d = 0; d < shape.size(); ++d) {
    std::vector<Box> finer;
    for (const Box& cell : cells) {
      for (std::int64_t begin = 0; begin < shape[d]; begin += 2) {
        Box part = cell;
        part.offsets[d] = begin;
        part.sizes[d] = std::min<std::int64_t>(2, shape[d] - begin);
        finer.push_back(part);
      }
    }
    cells = std::move(finer);
  }
  std::vector<Box> mine;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (static_cast<int>(i) % ranks == rank) mine.push_back(cells[i]);
  }
  return mine;
}

inline std::vector<NamedLayout> layouts() {
  const auto shard = [](std::int64_t dim) {
    return [dim](const Shape& shape, int rank, int ranks) {
      if (shape.empty()) return rank == 0 ? std::vector<Box>{Box()} : std::vector<Box>();
      const std::int64_t d = std::min<std::int64_t>(dim, static_cast<std::int64_t>(shape.size()) - 1);
      return std::vector<Box>{Box(chunk_boxes(shape, d, ranks)[static_cast<std::size_t>(rank)])};
    };
  };
  return {
      {"rows", shard(0)},
      {"columns", shard(1)},
      {"grid", grid_cells},
      {"replicated", [](const Shape& shape, int, int) { return std::vector<Box>{Box::full(shape)}; }},
      {"last_rank",
       [](const Shape& shape, int rank, int ranks) {
         return rank == ranks - 1 ? std::vector<Box>{Box::full(shape)} : std::vector<Box>();
       }},
  };
}

inline std::int64_t place_of(const ::tessera::testing::Element& element, const Shape& shape) {
  return ::tessera::testing::flat_index(element, Box::full(shape));
}

// The elements of a box as int64, with a gap after each row if `padded`.
struct Chunk {
  std::vector<std::int64_t> strides;
  std::shared_ptr<std::vector<std::int64_t>> elements;
};

inline Chunk make_chunk(const Box& box, bool padded, std::int64_t fill = -1) {
  std::vector<std::int64_t> outer = box.sizes;
  if (padded && !outer.empty()) outer.back() += 1;
  Chunk chunk{row_major_strides(outer), nullptr};
  std::int64_t count = 1;
  for (const std::int64_t size : outer) count *= size;
  chunk.elements = std::make_shared<std::vector<std::int64_t>>(static_cast<std::size_t>(count), fill);
  return chunk;
}

// Calls f(place in the tensor of this shape, value) for each element.
template <typename F>
void each_element(const Chunk& chunk, const Box& box, const Shape& shape, F&& f) {
  Box firsts = box;  // of the rows
  std::int64_t in_row = 1, stride = 1;
  if (box.rank() > 0) {
    in_row = box.sizes.back();
    stride = chunk.strides.back();
    firsts.sizes.back() = std::min<std::int64_t>(in_row, 1);
  }
  for (const auto& element : ::tessera::testing::elements(firsts)) {
    std::int64_t at = 0;
    for (std::size_t d = 0; d < box.rank(); ++d) at += (element[d] - box.offsets[d]) * chunk.strides[d];
    const std::int64_t place = place_of(element, shape);
    std::int64_t* const row = chunk.elements->data() + at;
    for (std::int64_t i = 0; i < in_row; ++i) f(place + i, row[i * stride]);
  }
}

// `added` is added to every element, to tell saves apart.
inline StateEntry tensor_entry(const std::string& name, const Shape& shape, const std::vector<Box>& boxes,
                               bool padded = false, std::int64_t added = 0) {
  StateTensor tensor;
  tensor.properties->dtype = DType::int64;
  tensor.shape = shape;
  for (const Box& box : boxes) {
    const Chunk chunk = make_chunk(box, padded);
    each_element(chunk, box, shape, [&](std::int64_t place, std::int64_t& value) { value = place + added; });
    tensor.chunks.push_back({box, [chunk] {
                               return HostMemory{reinterpret_cast<const std::uint8_t*>(chunk.elements->data()),
                                                 chunk.strides, chunk.elements};
                             }});
  }
  return {name, {name}, std::move(tensor)};
}

// An int, in the form that torch.save writes.
inline StateEntry object_entry(const std::string& name, std::int64_t value) {
  return {name, {name}, StateObject{[value] {
            Bytes data_pkl;
            pickle::Writer writer(data_pkl, 2);
            writer.integer(value);
            writer.stop();
            return torch_archive::ArchiveLayout("archive", data_pkl, {}).trailer({});
          }}};
}

// The targets of a rank and their memory.
struct Wanted {
  Targets targets;
  std::vector<std::pair<Box, Chunk>> chunks;
  std::vector<Shape> shapes;

  void add(const std::string& name, const Shape& shape, const std::vector<Box>& boxes, bool padded = false) {
    TargetTensor tensor;
    tensor.dtype = DType::int64;
    tensor.shape = shape;
    for (const Box& box : boxes) {
      chunks.emplace_back(box, make_chunk(box, padded));
      shapes.push_back(shape);
      const Chunk& chunk = chunks.back().second;
      tensor.chunks.push_back({box, {reinterpret_cast<std::uint8_t*>(chunk.elements->data()), chunk.strides}});
    }
    targets.push_back({name, std::move(tensor)});
  }
  // Returns whether each element is its position plus `added`.
  bool is_right(std::int64_t added = 0) const {
    bool right = true;
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      each_element(chunks[i].second, chunks[i].first, shapes[i],
                   [&](std::int64_t place, std::int64_t value) { right = right && value == place + added; });
    }
    return right;
  }
};

// --- tensors of every rank and an object

inline const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = {{}, {7}, {1}, {8, 4}, {5, 3}, {3, 2, 5}, {2, 3, 2, 3}, {0, 4}};
  return all;
}

// Tensors "tensor [7]" and so on, one per shape, in `layout`, some of them padded, and the int "step".
inline FlatState state_of(const Layout& layout, int rank, int ranks, std::int64_t added = 0) {
  FlatState state;
  for (const Shape& shape : shapes()) {
    state.push_back(
        tensor_entry("tensor " + shape_to_string(shape), shape, layout(shape, rank, ranks), shape.size() == 2, added));
  }
  state.push_back(object_entry("step", 100 + added));
  return state;
}

inline Wanted wanted_of(const Layout& layout, int rank, int ranks) {
  Wanted wanted;
  for (const Shape& shape : shapes()) {
    wanted.add("tensor " + shape_to_string(shape), shape, layout(shape, rank, ranks), shape.size() == 3);
  }
  wanted.targets.push_back({"step", TargetObject{}});
  return wanted;
}

// Saves on `ranks` threads. Returns the error of each rank, or "".
inline std::vector<std::string> save_on(int ranks, const Layout& layout, const std::shared_ptr<Storage>& storage,
                                        const WriteOptions& options = {}, std::int64_t added = 0) {
  return ::tessera::testing::run_thread_ranks(ranks, [&](::tessera::testing::ThreadLink& link) {
    write_state(state_of(layout, link.rank(), ranks, added), storage, link, options);
  });
}

// Loads everything on `ranks` threads and compares every element.
inline void expect_loads_on(int ranks, const Layout& layout, const std::shared_ptr<Storage>& storage,
                            std::int64_t added = 0) {
  const auto errors = ::tessera::testing::run_thread_ranks(ranks, [&](::tessera::testing::ThreadLink& link) {
    const Wanted wanted = wanted_of(layout, link.rank(), ranks);
    const ReadReport report = read_state(wanted.targets, open_on_all_ranks(storage, link), link);
    EXPECT_TRUE(wanted.is_right(added));
    EXPECT_EQ(pickle::repr(report.objects.at("step").value), std::to_string(100 + added));
  });
  EXPECT_THAT(errors, ::testing::Each(""));
}

}  // namespace tessera::checkpoint::saved
