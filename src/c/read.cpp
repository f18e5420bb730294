// Reading boxes of tensors into the caller's memory.

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "c/call.h"
#include "c/handles.h"
#include "c/memory.h"
#include "tessera/checkpoint/load.h"

namespace tessera::c {
namespace {

using checkpoint::Checkpoint;
using checkpoint::TensorInfo;

const TensorInfo& named(const Checkpoint& checkpoint, const char* name) {
  const auto found = checkpoint.find_tensor(name);
  if (!found) {
    fail(ErrorCode::not_found, "read {}: there is no tensor '{}', expected the name of one; it has {}",
         checkpoint.path().string(), printable(name), checkpoint.tensors().size());
  }
  return checkpoint.tensors()[*found];
}

// Takes the numbers of one box from the columns.
class Columns {
 public:
  Columns(const tessera_boxes& boxes, const Checkpoint& checkpoint) : boxes_(boxes), checkpoint_(checkpoint) {
    const auto both = [](const void* a, const void* b) { return (a == nullptr) == (b == nullptr); };
    if (!both(boxes.offsets, boxes.sizes) || !both(boxes.offsets, boxes.dims)) {
      fail(ErrorCode::invalid_argument, "{}: one of dims, offsets and sizes is NULL, expected all of them or none",
           kCall);
    }
    if (boxes.shapes != nullptr && boxes.dims == nullptr) {
      fail(ErrorCode::invalid_argument, "{}: shapes are passed without dims, expected both", kCall);
    }
    if (boxes.count == 0) return;
    required(boxes.names, kCall, "names");
    required(boxes.data, kCall, "data");
    required(boxes.data_bytes, kCall, "data_bytes");
  }

  checkpoint::TargetEntry next() {
    const std::size_t i = next_++;
    const std::string name = required(boxes_.names[i], kCall, "names", i);
    const TensorInfo& info = named(checkpoint_, name.c_str());
    const std::size_t dims = info.shape.size();
    if (boxes_.dims != nullptr && boxes_.dims[i] != dims) {
      refuse(i, name,
             fmt::format("has {} dimensions, expected {} for a tensor of shape {}", boxes_.dims[i], dims,
                         shape_to_string(info.shape)));
    }
    if (boxes_.shapes != nullptr && numbers(boxes_.shapes, dims) != info.shape) {
      refuse(i, name,
             fmt::format("has shape {}, expected {}", shape_to_string(info.shape),
                         shape_to_string(numbers(boxes_.shapes, dims))));
    }
    const Box box = boxes_.offsets == nullptr ? Box::full(info.shape)
                                              : Box(numbers(boxes_.offsets, dims), numbers(boxes_.sizes, dims));
    if (!is_valid(box, info.shape)) {
      refuse(i, name,
             fmt::format("is {}, expected a box within shape {}", to_string(box), shape_to_string(info.shape)));
    }
    std::vector<std::int64_t> strides;
    if (boxes_.strides != nullptr) strides = numbers(boxes_.strides, dims);
    if (std::any_of(strides.begin(), strides.end(), [](std::int64_t stride) { return stride < 0; })) {
      refuse(i, name, fmt::format("has strides {}, expected none below 0", shape_to_string(strides)));
    }
    numbers_before_ += dims;
    const DType dtype = dtype_of(i, name, info.dtype);
    const std::uint64_t bytes = extent_bytes(box, strides, dtype);
    if (boxes_.data_bytes[i] < bytes) {
      refuse(i, name, fmt::format("has memory of {} bytes, expected at least {}", boxes_.data_bytes[i], bytes));
    }
    if (bytes > 0) required(boxes_.data[i], kCall, "data", i);
    checkpoint::TargetMemory memory{static_cast<std::uint8_t*>(boxes_.data[i]), std::move(strides)};
    return {name, checkpoint::TargetTensor{dtype, info.shape, {{box, std::move(memory)}}}};
  }

 private:
  static constexpr std::string_view kCall = "tessera_read";

  [[noreturn]] static void refuse(std::size_t i, const std::string& name, const std::string& what) {
    fail(ErrorCode::invalid_argument, "{}: box {}, of tensor '{}', {}", kCall, i, printable(name), what);
  }
  std::vector<std::int64_t> numbers(const std::int64_t* column, std::size_t count) const {
    return {column + numbers_before_, column + numbers_before_ + count};
  }
  DType dtype_of(std::size_t i, const std::string& name, DType stored) const {
    if (boxes_.dtypes == nullptr || boxes_.dtypes[i] == nullptr) return stored;
    const std::optional<DType> dtype = find_dtype(boxes_.dtypes[i]);
    if (!dtype) {
      refuse(i, name,
             fmt::format("has memory of dtype '{}', expected one of PyTorch such as float32",
                         printable(boxes_.dtypes[i])));
    }
    return *dtype;
  }

  const tessera_boxes& boxes_;
  const Checkpoint& checkpoint_;
  std::size_t next_ = 0;
  std::size_t numbers_before_ = 0;  // of the boxes before the next one, in the columns with one for each dimension
};

checkpoint::ReadReport read(const tessera_checkpoint& handle, const tessera_boxes& boxes,
                            const tessera_read_options& options) {
  checkpoint::ReadOptions read;
  read.rules.allow_cast = options.cast != 0;
  read.check_checksums = options.no_checksums == 0;
  read.compare_rest = options.compare_rest != 0;
  read.threads = options.threads;
  observe(options.task, read);
  Columns columns(boxes, *handle.checkpoint);
  checkpoint::Targets targets;
  targets.reserve(boxes.count);
  for (std::size_t i = 0; i < boxes.count; ++i) targets.push_back(columns.next());
  return checkpoint::read_state(targets, handle.checkpoint, checkpoint::alone(), read);
}

}  // namespace
}  // namespace tessera::c

using namespace tessera;

extern "C" {

tessera_status tessera_read(const tessera_checkpoint* checkpoint, const tessera_boxes* boxes,
                            const tessera_read_options* options, tessera_read_report* report) {
  return c::call([&] {
    c::required(checkpoint, "tessera_read", "checkpoint");
    c::required(boxes, "tessera_read", "boxes");
    const checkpoint::ReadReport done =
        c::read(*checkpoint, c::options_of(boxes, "tessera_read"), c::options_of(options, "tessera_read"));
    if (report != nullptr) *report = {done.read_bytes, done.bytes_not_compared};
  });
}

tessera_status tessera_read_tensor(const tessera_checkpoint* checkpoint, const char* name, void* data,
                                   size_t data_bytes, const tessera_read_options* options) {
  return c::call([&] {
    c::required(checkpoint, "tessera_read_tensor", "checkpoint");
    c::required(name, "tessera_read_tensor", "name");
    const checkpoint::TensorInfo& info = c::named(*checkpoint->checkpoint, name);
    if (data_bytes != info.size_bytes()) {
      fail(ErrorCode::invalid_argument, "tessera_read_tensor: the memory has {} bytes, expected {} for tensor '{}'",
           data_bytes, info.size_bytes(), printable(name));
    }
    if (data_bytes > 0) c::required(data, "tessera_read_tensor", "data");
    tessera_boxes boxes{};
    boxes.struct_size = sizeof boxes;
    boxes.count = 1;
    boxes.names = &name;
    boxes.data = &data;
    boxes.data_bytes = &data_bytes;
    tessera_read_options all = c::options_of(options, "tessera_read_tensor");
    all.compare_rest = 1;
    c::read(*checkpoint, boxes, all);
  });
}

}  // extern "C"
